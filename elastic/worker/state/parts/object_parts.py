"""Parts of a `State` that are no modules and no optimizers: objects with `state_dict`, generators, plain values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from elastic.checkpoint.format.json_values import Codecs
from elastic.worker.torch_internals import torch_private

from .copies import Copy, warn_if_not_restored
from .described import fitting
from .json_codec import encode
from .parts import Coming, Infos, Named, Part, Watched


class ObjectPart(Part):
    """Anything with state_dict and load_state_dict, whose state_dict is JSON except for tensors."""

    kind = "object"

    def held(self) -> tuple[Named, Any]:
        encoded, found = self._encoded()
        return list((found if self._coming is None else self._coming.tensors).items()), encoded

    def adopt(self, infos: Infos, extra: Any) -> Mapping[str, torch.Tensor]:
        mine = self._encoded()[1]
        self._coming = Coming.of(
            extra, infos, self._codecs, lambda name, info, device: fitting(mine.get(name), info, device)
        )
        return self._coming.tensors

    def filled(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self._put(coming.value)
            self._compare(coming.extra, coming.tensors)

    def rest(self, before: Copy | None, watched: Watched) -> Copy | None:
        return Copy(self._get(), self.name, self._codecs, before, watched)

    def put_back(self, held: Any) -> None:
        tensors: dict[str, torch.Tensor] = {}
        given = encode(held, self.name, tensors, self._codecs)
        self._put(held)
        self._compare(given, tensors)

    def _compare(self, extra: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        warn_if_not_restored(self.name, (extra, tensors), self._encoded())

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        return encode(self._get(), self.name, tensors, self._codecs), tensors

    def _get(self) -> Any:
        return self.value.state_dict()

    def _put(self, held: Any) -> None:
        self.value.load_state_dict(held)


class ValuePart(ObjectPart):
    """A plain value, an attribute of the state."""

    kind = "value"

    def _get(self) -> Any:
        return self.value

    def _put(self, held: Any) -> None:
        self.value = held

    def _compare(self, extra: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        pass  # it is what it was set to


class ScalerPart(ObjectPart):
    """torch's GradScaler. Its `state_dict()` waits for the device, which costs too much at every commit."""

    def rest(self, before: Copy | None, watched: Watched) -> Copy | None:
        held = {key: value for key, value in vars(self.value).items() if key in torch_private.SCALER_STATE}
        return Copy(held, self.name, self._codecs, before, watched)

    def put_back(self, held: Any) -> None:
        vars(self.value).update(held)


class GeneratorPart(ObjectPart):
    """A random generator of torch, numpy or Python."""

    kind = "generator"

    def _get(self) -> Any:
        match self.value:
            case torch.Generator():
                return self.value.get_state().numpy().tobytes()
            case np.random.Generator():
                return self.value.bit_generator.state
        return self.value.getstate()

    def _put(self, held: Any) -> None:
        match self.value:
            case torch.Generator():
                self.value.set_state(torch.frombuffer(bytearray(held), dtype=torch.uint8))
            case np.random.Generator():
                self.value.bit_generator.state = held
            case _:
                self.value.setstate(held)


def object_part(name: str, value: Any, codecs: Codecs) -> ObjectPart:
    """The part of a value that is no module and no optimizer."""
    if isinstance(value, torch.amp.GradScaler):
        return ScalerPart(name, value, codecs)
    generator = isinstance(value, torch.Generator | np.random.Generator) or type(value) is random.Random
    if generator and not isinstance(value, tuple(codecs)):
        return GeneratorPart(name, value, codecs)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectPart(name, value, codecs)
    return ValuePart(name, value, codecs)
