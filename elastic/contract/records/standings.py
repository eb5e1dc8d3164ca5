"""How far ranks without progress have got, and why a job stands still: parts of the member and progress records."""

from __future__ import annotations

import msgspec

from elastic.contract.numbers import Int, Real, WallS

from .reasons import Text

FIRST_STEP_S = 30.0
"""Before the first step of a job its step time is unknown: no progress for this long is reported."""


class Standing(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far a rank that shows no progress has got, as its own agent sees it."""

    rank: Int
    position: tuple[Int, Int, Int]  # see `hang_rules.Position`
    doing: str
    silent_s: Real  # since its last sign of progress, when this was written
    gap_s: Real = 0.0  # its longest time without one on the way there
    waits: bool = False  # for other ranks
    stopped: bool = False  # its process is stopped by a signal
    deaf: bool = False  # no thread of it runs Python
    quiet: bool = False  # it has declared a span without steps


class Stillness(msgspec.Struct, frozen=True):
    """No rank has committed a step for longer than ten step times."""

    since_wall_s: WallS
    because: Text  # what is known of the cause
    rank: Int | None = None  # where the cause probably lies; None: not known
    node: str = ""  # its node, or the node that has not published how far its ranks have got
    declared: bool = False  # the script has declared this span (`job.quiet`)
