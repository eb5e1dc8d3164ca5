"""Commands about nodes: drain, settings, clean-up, bundle, installation."""
