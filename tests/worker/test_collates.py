"""`collate` functions as scripts have them, with every size of a rank's share: a part, and a batch of several streams,
are what the function makes of their samples, or the batch is refused by name."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from elastic.worker.data.batches import batches
from elastic.worker.data.sharding import rank_range
from elastic.worker.data.streams import streams

Named = namedtuple("Named", "x text")
Samples = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    tokens: Any
    count: int = 1


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that torch's pytree does not know."""


def sample(i: int, tokens: int | None = None) -> dict[str, Any]:
    """Sample i, with a number of tokens of its own; its image has 3 channels."""
    return {
        "x": torch.tensor([float(i)]),
        "image": torch.full((3, 2, 2), float(i)),
        "text": str(i),
        "tokens": [f"{i}.{n}" for n in range(i % 4 + 1 if tokens is None else tokens)],
        "choices": [[f"{i}{c}", "z"] for c in "abcd"],
        "row": np.array([i, i]),
        "pair": (str(i), f"{i}b"),
    }


def xs(samples: Samples) -> torch.Tensor:
    return torch.stack([each["x"] for each in samples])


def listed(samples: Samples, name: str) -> list[Any]:
    return [each[name] for each in samples]


EXACT: dict[str, Callable[[Samples], Any]] = {
    "pair": lambda s: (xs(s), xs(s)),
    "named": lambda s: Named(xs(s), listed(s, "text")),
    "dataclass": lambda s: Fields(xs(s), listed(s, "tokens")),
    "mapping": lambda s: Encoding(x=xs(s), tokens=listed(s, "tokens"), y=OrderedDict(x=xs(s))),
    "texts": lambda s: listed(s, "text"),
    "tuple of texts": lambda s: tuple(listed(s, "text")),
    "one token each": lambda s: {"x": xs(s), "tokens": [[each["text"]] for each in s]},
    "tokens": lambda s: {"x": xs(s), "tokens": listed(s, "tokens")},
    "choices": lambda s: {"choices": listed(s, "choices"), "x": xs(s)},
    "choices alone": lambda s: listed(s, "choices"),
    "a list of dicts": lambda s: [{"tokens": each["tokens"]} for each in s],
    "optional": lambda s: (xs(s), [each["text"] if float(each["x"]) % 2 else None for each in s]),
    "two lists": lambda s: (listed(s, "text"), listed(s, "text")),
    "zipped": lambda s: tuple(zip(*[(each["text"], each["tokens"]) for each in s], strict=True)),
    "constants": lambda s: {"x": xs(s), "name": "train", "scale": 2.0, "none": None, "factor": torch.tensor(3.0)},
    "rows": lambda s: {"rows": np.stack(listed(s, "row")), "x": xs(s)},
    "nested": lambda s: {"x": torch.nested.as_nested_tensor([e["x"].expand(3) for e in s], layout=torch.jagged)},
}  # fmt: skip
"""Own functions whose samples can be told apart in batches of any size."""

DEFAULT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda s: {"x": s["x"], "text": s["text"], "pair": s["pair"]},
    "pair of texts": lambda s: s["pair"],
    "four texts": lambda s: [each[0] for each in s["choices"]],
    "lists of lists": lambda s: s["choices"],
    "a pair": lambda s: (s["x"], s["text"]),
    "named": lambda s: Named(s["x"], s["text"]),
    "a text": lambda s: s["text"],
    "numbers": lambda s: [float(s["x"]), 1],
    "row": lambda s: s["row"],
}
"""Samples for `default_collate`, which any batch of is cut."""

REFUSED: dict[str, Callable[[Samples], Any]] = {
    "images": lambda s: {"images": listed(s, "image"), "x": xs(s)},
    "images alone": lambda s: listed(s, "image"),
    "numbers alone": lambda s: list(xs(s).flatten()[: len(s)]),
    "zipped images": lambda s: tuple(zip(*[(each["image"], each["text"]) for each in s], strict=True)),
    "targets": lambda s: (xs(s), [{"boxes": each["image"]} for each in s]),
    "by time": lambda s: torch.cat([xs(s).t(), xs(s).t()])[:1].expand(7, len(s)),
    "packed": lambda s: {"x": pack_sequence([each["x"].expand(2) for each in s])},
    "object": lambda s: SimpleNamespace(x=xs(s)),
}
"""Own functions whose batches are refused, of any size."""


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and a.is_nested:
        return alike(list(a.unbind()), list(b.unbind()))
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (dict, Encoding)):
        return type(a) is type(b) and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a) or isinstance(a, SimpleNamespace):
        return type(a) is type(b) and alike(vars(a), vars(b))
    return type(a) is type(b) and bool(a == b)


class Data:
    def __init__(self, made: Callable[[dict[str, Any]], Any] = lambda made: made) -> None:
        self._made = made

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> Any:
        return self._made(sample(i))


def check_parts(data: Data, collate: Any, size: int, micro: int) -> None:
    """Of both ranks; with a share of 0 the second one has a sample that does not count."""
    for rank in range(2):
        options: dict[str, Any] = {"shuffle": False, "collate": collate, "micro_batch": micro}
        state = SimpleNamespace(step=0)
        batch = next(batches(data, state, batch_size=max(1, 2 * size), rank=rank, world_size=2, **options))
        want = collate or default_collate
        assert alike(batch.data, want([data[i] for i in batch.indices or (0,)]))
        for part in batch.parts():
            assert alike(part.data, want([data[i] for i in part.indices or (0,)])), part.indices


SIZES = [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("size", "micro"), SIZES)
@pytest.mark.filterwarnings("ignore:.*nested")
def test_a_part_is_what_the_function_makes_of_its_samples(name: str, size: int, micro: int) -> None:
    check_parts(Data(), EXACT[name], size, micro)


@pytest.mark.parametrize("name", DEFAULT)
@pytest.mark.parametrize(("size", "micro"), SIZES)
def test_a_part_is_what_default_collate_makes_of_its_samples(name: str, size: int, micro: int) -> None:
    check_parts(Data(DEFAULT[name]), None, size, micro)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_cannot_be_told_apart_is_refused_in_batches_of_any_size(name: str, size: int) -> None:
    with pytest.raises(TypeError, match=r"batch\.parts\(\): (a |PackedSequence |SimpleNamespace )"):
        check_parts(Data(), REFUSED[name], size, 1)


@pytest.mark.parametrize(
    "collate",
    [
        lambda s: list(zip(*listed(s, "pair"), strict=True)),
        lambda s: [np.stack(listed(s, "row"))[:, 0], np.stack(listed(s, "row"))[:, 1]],
    ],
)
def test_a_list_of_as_many_columns_as_samples_is_refused_and_of_another_number_cut(collate: Any) -> None:
    check_parts(Data(), collate, 3, 1)
    with pytest.raises(TypeError, match=r"may be a list of samples or of columns: let collate return .* dict"):
        check_parts(Data(), collate, 2, 1)


@pytest.mark.parametrize(
    "collate",
    [
        lambda s: [xs(s), xs(s)],
        lambda s: {"inputs": [xs(s), 2 * xs(s)], "labels": xs(s)[:, 0]},
        lambda s: {"inputs": (xs(s), 2 * xs(s), 3 * xs(s)), "texts": listed(s, "text")},
    ],
)
def test_a_list_of_stacked_tensors_has_the_columns_in_batches_of_any_size(collate: Any) -> None:
    """It was refused in a batch of as many samples as it has entries, and cut in others."""
    for size in (1, 2, 3, 4, 5):
        check_parts(Data(), collate, size, 1)


def test_a_list_of_columns_of_unlike_kinds_is_cut_as_such() -> None:
    for size in (1, 2, 3, 4):
        check_parts(Data(), lambda s: [xs(s), torch.zeros(len(s), dtype=torch.long)], size, 1)
        check_parts(Data(), lambda s: [xs(s), listed(s, "text")], size, 1)


# ── several streams ─────────────────────────────────────────────────────────────────────────────────────────


def stream_of(make: Callable[[int], Any]) -> Callable[[int, int], Any]:
    return lambda number, count: [make(10 * number + i) for i in range(4)]


def of_streams(
    make: Callable[[int], Any], collate: Any, count: int, each: int, world_size: int, workers: int
) -> list[Any]:
    """The data of each rank's first batch."""
    found = []
    for rank in range(world_size):
        state = SimpleNamespace(step=0, streams={"step": 0, "states": {}})
        options: dict[str, Any] = {"count": count, "batch_size": count * each, "steps": 1, "num_workers": workers}
        loop = streams(stream_of(make), state, rank=rank, world_size=world_size, collate=collate, **options)
        found.append(next(loop).data)
        loop.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", [*EXACT, *REFUSED])
@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:.*nested")
def test_a_batch_of_streams_is_what_the_function_makes_of_all_its_samples(name: str, each: int) -> None:
    pytest.importorskip("torchdata")
    collate: Any = (EXACT | REFUSED)[name]
    for world_size in (1, 2, 3):
        for rank, data in enumerate(of_streams(sample, collate, 3, each, world_size, 0)):
            here = range(*rank_range(0, 3, rank, world_size))
            assert alike(data, collate([sample(10 * n + i) for n in here for i in range(each)]))


@pytest.mark.parametrize("name", DEFAULT)
@pytest.mark.parametrize("each", [1, 2, 4])
def test_a_batch_of_streams_is_what_default_collate_makes_of_all_its_samples(name: str, each: int) -> None:
    pytest.importorskip("torchdata")
    make = lambda i: DEFAULT[name](sample(i))  # noqa: E731
    (data,) = of_streams(make, None, 3, each, 1, 0)
    assert alike(data, default_collate([make(10 * n + i) for n in range(3) for i in range(each)]))


def test_streams_whose_samples_have_their_keys_in_another_order_are_joined_by_key() -> None:
    pytest.importorskip("torchdata")

    def make(i: int) -> Any:
        return {"a": i, "b": -i} if i < 10 else {"b": -i, "a": i}

    (data,) = of_streams(make, None, 2, 2, 1, 0)
    assert data["a"].tolist() == [0, 1, 10, 11]
    with pytest.raises(ValueError, match="a stream's samples have the keys a, b, those of another one a"):
        of_streams(lambda i: {"a": i, "b": i} if i < 10 else {"a": i}, None, 2, 2, 1, 0)


def test_the_function_is_called_with_the_samples_that_loader_processes_have_read() -> None:
    pytest.importorskip("torchdata")
    (data,) = of_streams(sample, EXACT["tokens"], 2, 2, 1, 1)
    assert alike(data, EXACT["tokens"]([sample(i) for i in (0, 1, 10, 11)]))


def test_mappings_and_dataclasses_are_moved_with_their_tensors() -> None:
    from elastic.worker.data.containers import moved

    samples = [sample(i) for i in range(2)]
    for name in ("mapping", "dataclass", "named", "pair", "constants"):
        made: Any = EXACT[name](samples)
        there = moved(made, torch.device("meta"))
        assert type(there) is type(made)
        x = there["x"] if isinstance(there, (dict, Encoding)) else there.x if hasattr(there, "x") else there[0]
        assert x.device.type == "meta"
    packed = moved(pack_sequence([torch.ones(2), torch.ones(1)]), torch.device("meta"))
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")


def test_a_list_of_numbers_is_moved_without_a_look_into_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tokens: to ask of each number whether it is a container took five times as long as one pass."""
    from elastic.worker.data import containers

    looks = []
    opened = containers.opened
    monkeypatch.setattr(containers, "opened", lambda node: looks.append(node) or opened(node))
    data = {"tokens": [list(range(100)) for _ in range(4)], "texts": ["a", None, 0.5], "x": torch.ones(2)}
    there = containers.moved(data, torch.device("meta"))
    assert (there["tokens"], there["texts"], there["x"].device.type) == (data["tokens"], data["texts"], "meta")
    assert len(looks) < 10
