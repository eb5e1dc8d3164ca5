"""What the operating system offers by number or by trick is spelled in one module each, in `elastic/util`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from support.source import modules

HOMES = {
    "PR_SET_PDEATHSIG": "elastic.util.processes",
    "socket.SCM_RIGHTS": "elastic.util.descriptors",
    "attempts:0": "elastic.util.resolver",
}
"""Word -> module."""


def strays(sources: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (word, module)
        for module, text in sources
        for word, home in HOMES.items()
        if re.search(rf"\b{re.escape(word)}\b", text) and module != home
    ]


def test_operating_system_helpers_have_one_home() -> None:
    assert strays((name, path.read_text()) for name, path in modules().items()) == []


def test_a_second_home_is_seen() -> None:
    assert strays([("elastic.agent.workers.pool", "_PR_SET_PDEATHSIG = 1; PR_SET_PDEATHSIG")]) == [
        ("PR_SET_PDEATHSIG", "elastic.agent.workers.pool")
    ]
