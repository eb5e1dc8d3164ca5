"""What elasticctl prints: the columns of status, tables, curves, styled text."""
