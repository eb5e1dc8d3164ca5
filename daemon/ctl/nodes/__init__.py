"""Commands about nodes, settings and the installation."""
