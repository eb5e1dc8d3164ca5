"""Which silence is a hang, after how long, and why a job makes no step."""
