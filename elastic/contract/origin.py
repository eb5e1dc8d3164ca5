"""The kinds of state that a generation resumes from."""

from __future__ import annotations

import enum


class Origin(enum.StrEnum):
    LIVE = "live"
    """A rank has it in its process."""
    SNAPSHOT = "snapshot"
    """An agent has it in memory."""
    CHECKPOINT = "checkpoint"
    SETUP = "setup"
    """There was none: training begins with the result of the script's `setup`."""
    NOTHING = "nothing"
    """Of an incident: the job was given up."""
