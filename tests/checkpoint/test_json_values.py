"""The JSON of a state in plain torch's form."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch

from elastic.checkpoint.format.json_values import decode
from elastic.worker.state.parts.json_codec import CannotEncodeError, encode


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (frozenset({1}), {1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(int, {1: 2}), {1: 2}),
        (collections.OrderedDict([((1,), b"x")]), collections.OrderedDict([((1,), b"x")])),
        ([1 << 60, float("inf")], [1 << 60, float("inf")]),
        (np.float32(1.5), {"$numpy": "<f4", "value": "AADAPw=="}),
        (1 + 2j, {"$as": "builtins.complex", "value": [1.0, 2.0]}),
        ({"a": torch.ones(2)}, {"a": "v.a"}),
    ],
)
def test_plain_form_has_only_types_that_torch_loads_with_weights_only(value: Any, plain: Any) -> None:
    codecs = {complex: (lambda held: [held.real, held.imag], lambda pair: complex(*pair))}
    built: Any = decode(encode(value, "v", {}, codecs), lambda name, _: name, {}, plain=True)  # type: ignore[arg-type,return-value]
    assert built == plain
    assert type(built) is type(plain)


@pytest.mark.parametrize("value", ["\udcff.png", ["ä", "\udcff.png"], {"\udcff.png": 1}, {1: "\ud800"}])
def test_text_that_is_no_unicode_is_refused_by_name(value: Any) -> None:
    """As the name of a file has it whose bytes are no UTF-8; it was found out at the first commit, by msgspec."""
    with pytest.raises(CannotEncodeError, match=r"state\.seen.* is str, which JSON cannot hold: .*os\.fsencode"):
        encode(value, "seen", {}, {})


def test_all_other_text_stays_as_it_is() -> None:
    for text in ("", "ä", "\U0001f600", "\0"):
        assert encode({text: text}, "seen", {}, {}) == {text: text}
