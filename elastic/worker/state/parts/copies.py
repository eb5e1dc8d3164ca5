"""In-memory copies of small items: nested plain values with tensors in them, taken at each commit.

A copy is one byte string and the tensors beside it. It never leaves the process, so pickling is harmless here; it is
about ten times faster than the JSON of `json_codec`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
import xxhash

from elastic.checkpoint.format.json_values import Codecs, decode

from .boxes import local
from .json_codec import encode

COMPARED_BYTES = 16 * 1024 * 1024
"""The elements of tensors are compared up to this size in all; of the others type and shape."""

Held = tuple[Any, Mapping[str, torch.Tensor]]
"""Everything but tensors as JSON, and the tensors by name."""


def warn_if_not_restored(name: str, given: Held, now: Held) -> None:
    """Print the first difference for part `name`, if there is one. No error: an object may well count its loads."""
    if not (text := next(differences(name, given, now), "")):
        return
    print(
        f"elastic: state.{text}: load_state_dict() of state.{name} does not take all that its state_dict() contains. "
        "This rank goes on with another value than the other ranks, and the replicas may drift apart. Let "
        "load_state_dict() restore each key that state_dict() returns, or leave the key out of both",
        file=sys.stderr,
        flush=True,
    )


def differences(name: str, given: Held, now: Held) -> Iterator[str]:
    """What differs, as texts that begin with the name."""
    yield from _plain(name, given[0], now[0])
    room = COMPARED_BYTES
    for path, tensor in given[1].items():
        here = now[1].get(path)
        if here is None or here is tensor:
            continue  # where it is missing, its place in the JSON differs
        if (here.dtype, here.shape) != (tensor.dtype, tensor.shape):
            yield f"{path} is {_form(here)} after it was loaded, and was given as {_form(tensor)}"
        elif (room := room - tensor.nbytes) >= 0 and not equal(here.detach().cpu(), tensor.detach().cpu()):
            yield f"{path} has other elements after it was loaded than were given"


def _plain(path: str, given: Any, now: Any) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(now, dict):
        if "$tensor" in given and "$tensor" in now:
            return  # the tensors are compared by name; it may lie on another device
        for key in [*given, *(key for key in now if key not in given)]:
            inner = path if key.startswith("$") else f"{path}.{key}"
            if key not in now or key not in given:
                yield f"{inner} is {'missing' if key in given else 'new'} after state.{path} was loaded"
            elif key in ("$dict", "$counter"):
                yield from _plain(inner, sorted(given[key], key=repr), sorted(now[key], key=repr))
            else:
                yield from _plain(inner, given[key], now[key])
    elif isinstance(given, list) and isinstance(now, list) and len(given) == len(now):
        for place, (before, after) in enumerate(zip(given, now, strict=True)):
            yield from _plain(f"{path}.{place}", before, after)
    elif type(given) is not type(now) or given != now:
        yield f"{path} is {_short(now)} after it was loaded, and was given as {_short(given)}"


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


SMALL_BYTES = 64 * 1024
"""Integer and boolean tensors up to this size are copied at each commit; larger ones, such as masks, only if their
mark has changed. Floating-point tensors are always copied: torch's batch_norm does not count its changes."""
HASHED_BYTES = 1024 * 1024
_PLAIN = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class Copy:
    """A copy of `value`. The tensors in it remain the same objects."""

    def __init__(
        self, value: Any, path: str, codecs: Codecs, before: Copy | None, watched: Callable[[torch.Tensor], bool]
    ) -> None:
        """`before`: the previous copy, whose tensors are reused where still valid.

        `watched`: whether a tensor is not copied; the caller detects its changes. Raises CannotEncodeError if `value`
        contains anything that neither pickle nor `json_codec` can encode.
        """
        writer = io.BytesIO()
        pickler = _Pickler(writer)
        try:
            pickler.dump(value)
            self.raw: bytes | None = writer.getvalue()
        except (TypeError, AttributeError, pickle.PicklingError):
            self.raw = None  # a lambda, a lock: needs `convert`
        self.tree: Any = None
        self._codecs = codecs
        self._named: dict[str, torch.Tensor] = {}
        if before is not None and self.raw is not None and before.raw == self.raw:
            self.tree = before.tree
        elif self.raw is None or pickler.unusual:
            self.tree = encode(value, path, self._named, codecs)
        self.tensors = pickler.tensors if self.raw is not None else list(self._named.values())
        was = zip(before.tensors, before.saved, before.marks, strict=True) if before is not None else ()
        kept = {id(tensor): (saved, then) for tensor, saved, then in was}
        self.marks: list[Mark] = [mark(tensor) for tensor in self.tensors]
        self.saved: list[torch.Tensor | None] = []
        for tensor, now in zip(self.tensors, self.marks, strict=True):
            if watched(tensor):
                self.saved.append(None)
                continue
            old, then = kept.get(id(tensor), (None, None))
            still = old is not None and then == now and counted(tensor)
            self.saved.append(old if still else tensor.detach().clone())

    def same(self, other: Copy, *, wait: bool = True) -> bool:
        """Whether both are of equal values. Tensors on a GPU that are other objects now are compared only if `wait`."""
        if len(self.tensors) != len(other.tensors) or not all(
            map(self._same_tensor, range(len(self.tensors)), repeat(other), repeat(wait))
        ):
            return False
        if self.raw is not None and self.raw == other.raw:
            return True
        if self.tree is None and other.tree is None:
            return _alike(self._shape(), other._shape())
        return bool(self.tree == other.tree)  # not by `==` of the value's own types: numpy's returns an array

    def _same_tensor(self, place: int, other: Copy, wait: bool) -> bool:
        mine, theirs = self.tensors[place], other.tensors[place]
        a, b = self.saved[place], other.saved[place]
        if mine is theirs and (self.marks[place] == other.marks[place] or a is None or b is None):
            return self.marks[place] == other.marks[place]
        # A change in place may have been undone, as by an evaluation: worth a wait to find out.
        if mine is not theirs and not wait and mine.device.type != "cpu":
            return True
        # One that is not copied is watched: what is in it now was in it at the commit.
        return equal(mine if a is None else a, theirs if b is None else b)

    def _shape(self) -> Any:
        """The value with placeholders for its tensors."""
        assert self.raw is not None
        return _Unpickler(io.BytesIO(self.raw), [f"tensor {i}" for i in range(len(self.tensors))]).load()

    def put_tensors_back(self) -> None:
        """Restore the contents of the tensors; those that cannot be written in place are left as they are."""
        with torch.no_grad():
            for tensor, saved, then in zip(self.tensors, self.saved, self.marks, strict=True):
                if saved is not None and writable(tensor) and not unmarked(tensor, then):
                    tensor.copy_(saved)

    def restored(self) -> Any:
        """The value as it was: new lists and dicts, the same tensor objects, whose contents `put_tensors_back`
        restores."""
        if self.raw is None:
            return decode(self.tree, lambda name, _: self._named[name], self._codecs)
        return _Unpickler(io.BytesIO(self.raw), self.tensors).load()


Mark = tuple[int, int, int]


def mark(tensor: torch.Tensor) -> Mark:
    """A value that changes when the tensor is changed in place or gets other storage.

    A change through NumPy or `.data` is seen in the hash, which only tensors have that are copied if their mark has
    changed, up to HASHED_BYTES: 3 µs per 100 KiB.
    """
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), _hash(tensor) if counted(tensor) else 0


def _hash(tensor: torch.Tensor) -> int:
    if tensor.nbytes > HASHED_BYTES or tensor.device.type != "cpu" or tensor.dtype not in _PLAIN:
        return 0
    if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
        return 0
    return xxhash.xxh3_64_intdigest(tensor.detach().numpy().data)


def counted(tensor: torch.Tensor) -> bool:
    """Whether its mark alone decides if it has changed."""
    return tensor.nbytes > SMALL_BYTES and not (tensor.is_floating_point() or tensor.is_complex())


def unmarked(tensor: torch.Tensor, then: Mark) -> bool:
    """Whether a counted tensor has not changed since `then`, as far as its mark tells. Its copy may be of an earlier
    commit, before changes that the mark has not told: it must not be put back."""
    return counted(tensor) and mark(tensor) == then


def immutable(value: Any) -> bool:
    """Whether it stays equal to itself; False where that is not certain."""
    if type(value) is tuple:
        return all(map(immutable, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def writable(tensor: torch.Tensor) -> bool:
    """Whether its contents can be written in place: not if it is expanded, or was created under
    `torch.inference_mode`."""
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        return False
    return not tensor.is_inference()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are bit-identical; of DTensors what is in this rank's memory, as torch would ask the other ranks.
    Waits for the device."""
    a, b = local(a), local(b)
    alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
    return alike and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as bytes, by which NaN is equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b or (a != a and b != b))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[torch.Tensor] = []
        self.unusual = False
        """The value contains an object that is neither a tensor nor of a built-in type."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return _tensor, (len(self.tensors) - 1,)
        self.unusual = self.unusual or not isinstance(obj, type)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str, /) -> Any:
        if name == "_tensor" and module == __name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _tensor(index: int) -> torch.Tensor:
    raise AssertionError(f"tensor {index} is looked up by _Unpickler")
