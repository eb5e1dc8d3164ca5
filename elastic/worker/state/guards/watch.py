"""Detects that tensors were changed, without copying them.

A change in place moves a tensor's version counter, unless it bypasses autograd: through ``.data``, through numpy, or in
a kernel that was given an address. So a sample of the elements is kept as well. On a GPU that is one concatenation,
queued like any other kernel, without waiting.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence

import torch

from elastic.worker.state.parts.boxes import is_sharded

WINDOW = 1024
"""Number of tensors sampled at a time; with more tensors, the next window each time."""

ELEMENTS = 4096
"""Number of elements of a sample, over all tensors of the window; at least one of each tensor."""

SPAN_ELEMENTS = 16
"""For tensors in CPU memory: number of elements sampled at the beginning, in the middle and at the end of each."""

_VERSION = operator.attrgetter("_version")
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Version counters; 0 for tensors that have none (created under `torch.inference_mode`)."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class TensorWatch:
    """`take`, and later `changed`: by the version counters of all tensors, and the sample."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._plain: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._round = 0
        self._window: _Window | None = None
        self._sample: Sample = b"", []

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Record the current versions and take a sample."""
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            self._tensors = tensors
            self._plain = [i for i, tensor in enumerate(tensors) if type(tensor) in _PLAIN and _has_elements(tensor)]
            self._windows = {}
        self._versions = versions(tensors)
        self._window = None
        if self._plain:
            count = -(-len(self._plain) // WINDOW)
            self._round = (self._round + 1) % count
            window = self._windows.get(self._round)
            if window is None or window.moved():
                places = self._plain[self._round * WINDOW : (self._round + 1) * WINDOW]
                window = self._windows[self._round] = _Window(places, [tensors[i] for i in places])
            self._window = window
            self._sample = window.sample()

    def stepped(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Indices of the tensors whose version counter has moved, or that are other objects now. Fast. A DTensor with
        the whole tensor in its place, as within FSDP's backward, counts as unchanged."""
        if len(tensors) != len(self._tensors):
            return list(range(len(self._tensors)))
        now = versions(tensors)
        if now == self._versions and all(map(operator.is_, tensors, self._tensors)):
            return []
        pairs = zip(now, self._versions, tensors, self._tensors, strict=True)
        moved = [(i, new, old) for i, (a, b, new, old) in enumerate(pairs) if a != b or new is not old]
        return [i for i, new, old in moved if is_sharded(new) or not is_sharded(old)]

    def differs(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """As `changed`, but a tensor that was changed and changed back counts as unchanged, as far as the sample
        shows; for example weights that were swapped for their average during an evaluation. Waits for the device
        only if a version counter has moved."""
        moved = self.stepped(tensors)
        if not moved or len(tensors) != len(self._tensors):
            return moved
        others = [place for place in moved if tensors[place] is not self._tensors[place]]
        differing = sorted({*others, *self._differing()})
        if not differing:
            self._versions = versions(tensors)
        return differing

    def changed(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Indices of the tensors that have changed. Waits for the device."""
        stepped = set(self.stepped(tensors))
        window = self._window
        if window is None or len(tensors) != len(self._tensors):
            return sorted(stepped)
        # A tensor that only has other storage now, as an LSTM's weights after `flatten_parameters`, is unchanged.
        moved = {i for i in window.moved() if tensors[i] is self._tensors[i]}
        return sorted((stepped - moved) | self._differing())

    def _differing(self) -> set[int]:
        """Indices of the tensors whose elements differ from the sample."""
        if self._window is None:
            return set()
        places = self._window.places
        return _Window(places, [self._tensors[i] for i in places]).differing(self._sample)


Sample = tuple[bytes, list[torch.Tensor]]
"""(bytes of tensors in CPU memory, elements of tensors on devices)."""


class _Window:
    """A few elements of each of some tensors, in place, so that all can be gathered at once."""

    def __init__(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self.places = places
        self._tensors = tensors
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._kept = [tensor.detach() for tensor in tensors]
        """Keeps the memory that is sampled below allocated."""
        each = max(1, ELEMENTS // len(tensors))
        self._spans: list[memoryview] = []
        self._of_spans: list[int] = []
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.device.type == "cpu":
                spans = _spans(tensor, each)
                self._spans += spans
                self._of_spans += [place] * len(spans)
                continue
            view = _elements(tensor, each)
            numbers, views = groups.setdefault((view.device, view.dtype), ([], []))
            numbers.append(place)
            views.append(view)
        self._groups = list(groups.values())

    def moved(self) -> list[int]:
        """Indices of the tensors that have other storage now."""
        now = list(map(torch.Tensor.data_ptr, self._tensors))
        if now == self._addresses:
            return []
        return [place for place, a, b in zip(self.places, now, self._addresses, strict=True) if a != b]

    def sample(self) -> Sample:
        return b"".join(self._spans), [torch.cat(views) for _, views in self._groups]

    def differing(self, before: Sample) -> set[int]:
        """Indices of the tensors whose elements differ from `before`."""
        changed: set[int] = set()
        spans, gathered = self.sample()
        if spans != before[0]:
            start = 0
            for place, span in zip(self._of_spans, self._spans, strict=True):
                stop = start + len(span)
                if spans[start:stop] != before[0][start:stop]:
                    changed.add(place)
                start = stop
        if len(gathered) != len(before[1]):  # one has another type
            return {*self.places}
        for (places, views), now, then in zip(self._groups, gathered, before[1], strict=True):
            if now.numel() != then.numel():  # one has another shape
                changed.update(places)
                continue
            if torch.equal(now, then):
                continue
            sizes = [view.numel() for view in views]
            pairs = zip(places, torch.split(now, sizes), torch.split(then, sizes), strict=True)
            changed.update(place for place, a, b in pairs if not torch.equal(a, b))
        return changed


def _has_elements(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last of the tensor, in the order of its storage."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _spans(tensor: torch.Tensor, most: int) -> list[memoryview]:
    """Some bytes at its beginning, in its middle and at its end. Valid while its storage is."""
    size = tensor.element_size()
    extent, length = _extent(tensor) * size, min(most, SPAN_ELEMENTS) * size
    starts = [0] if extent <= length else sorted({0, (extent - length) // 2 // size * size, extent - length})
    start_of_all = tensor.data_ptr()
    return [
        memoryview((ctypes.c_char * min(length, extent)).from_address(start_of_all + start)).cast("B")
        for start in starts
    ]


def _elements(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Some elements from its middle, as integers, so that NaN is equal to itself. One kernel gathers such views."""
    flat, extent = tensor.detach(), _extent(tensor)
    count = min(most, extent)
    view = flat.as_strided((count,), (1,), flat.storage_offset() + (extent - count) // 2)
    integers = _INTEGERS.get(view.element_size())
    return view if integers is None else view.view(integers)
