"""The command `elasticctl`."""
