"""``python -m elastic.agent DIR``: run one job on this node, as configured in DIR/config.json."""

from __future__ import annotations

import sys

from elastic.agent.workers.first_zygote import FirstZygote

from .workers import first_zygote


def main(argv: list[str], first: FirstZygote | None = None) -> int:
    from .node import run  # not before the fork: a worker would find the modules of the agent imported

    return run(argv[0], first)


def begin(argv: list[str]) -> int:
    """As `main`, with one import of torch for agent and zygote where that is possible. Workers, forks of a fork of this
    process, end by a SystemExit that passes through here: nothing below it may have anything to undo."""
    first = first_zygote.fork(argv[0])
    if first is not None and first.pid == 0:
        return first_zygote.become(first)
    return main(argv, first)


if __name__ == "__main__":
    sys.exit(begin(sys.argv[1:]))
