"""Which silence is a hang."""
