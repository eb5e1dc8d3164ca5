"""What elasticctl prints: styled text, tables, curves."""
