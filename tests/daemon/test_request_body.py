"""What a request's body may be."""

from __future__ import annotations

import pytest

from elasticd.api.request import json_object as body
from elasticd.base.errors import Refused


def test_an_object() -> None:
    assert body(b"") == {}
    assert body('{"reason": "Wörter \\u2192"}'.encode()) == {"reason": "Wörter →"}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "is not JSON"),
        (b'{"reason": "\xff"}', "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[]", "must be a JSON object"),
        (rb'{"args": ["caf\udce9.png"]}', r"holds what is no Unicode text: .*caf\\udce9.png"),
    ],
)
def test_anything_else_is_refused_with_a_reason(raw: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        body(raw)
    assert refused.value.status == 400
