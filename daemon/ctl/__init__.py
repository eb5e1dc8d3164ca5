"""The command `elasticctl`: its client, options and exit codes."""
