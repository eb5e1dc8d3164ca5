"""A tensor's description in the table of a state, created once and checked at each use; and a tensor for one."""

from __future__ import annotations

import functools
import weakref

import torch

from elastic.checkpoint.format.dtypes import CODES, dtype_of
from elastic.checkpoint.memory.memcpy import device_type, movable
from elastic.contract.worker.tensor_table import TensorInfo
from elastic.worker.link.misuse import MisuseTypeError

from .boxes import WHOLE, Box, box_of, local
from .copies import writable

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Described:
    """A tensor's entry in the table, created once: with thousands of tensors that is most of the cost of a snapshot.
    And where its bytes are: to ask each of them again takes as long as all that is asked by `still`."""

    __slots__ = ("_dtype", "_place", "_pointer", "_shape", "_stride", "_tensor", "address", "device", "info")

    def __init__(self, name: str, tensor: torch.Tensor, box: Box = WHOLE) -> None:
        self.info = _info(name, tensor, box)
        self.device = device_type(tensor)
        """Type of its device."""
        self._pointer = tensor.data_ptr()
        self.address = self._pointer if movable(tensor) else 0
        """Where its bytes lie in CPU memory, as in a file; 0: they do not, or there are none."""
        self._tensor = weakref.ref(tensor)
        self._shape, self._stride, self._dtype = self.info.shape, tensor.stride(), tensor.dtype
        self._place: object = None

    def place(self, tensor: torch.Tensor) -> object:
        """A key that is equal for tensors with the same memory and the same view of it. `tensor`: the described
        tensor."""
        if self._place is None and (tensor.numel() == 0 or tensor.device.type == "meta"):
            self._place = id(tensor)
        elif self._place is None:
            self._place = tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()
        return self._place

    def still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the described tensor, with the same storage, shape, dtype and order of its elements in
        memory. One without elements may be on another device now: it is described anew."""
        return (
            self._tensor() is tensor
            and self._pointer == tensor.data_ptr() != 0
            and self._shape == tensor.shape
            and self._dtype is tensor.dtype
            and (
                tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
                if self.address
                else self._stride == tensor.stride()
            )
        )


def _info(name: str, tensor: torch.Tensor, box: Box) -> TensorInfo:
    if odd := _odd(tensor):
        raise MisuseTypeError(
            f"state.{name} is {odd} ({type(tensor).__name__}, {tensor.layout}, {tensor.dtype}): only dense tensors "
            f"that are whole on each rank can be kept; keep it dense (tensor.to_dense(), tensor.dequantize()) in the "
            f"state and make the other form of it where it is used"
        )
    if tensor.device.type == "meta":
        raise MisuseTypeError(
            f"state.{name} has no elements yet (device meta): let setup() give it memory and initialise it, as by "
            f"module.to_empty(device=...), before it builds the State"
        )
    if (code := CODES.get(tensor.dtype)) is None:
        raise MisuseTypeError(
            f"state.{name} is of {tensor.dtype}, which no checkpoint can hold: keep its bytes in the "
            f"state, tensor.view(torch.uint8)"
        )
    return TensorInfo(name, code, tuple(tensor.shape), tensor.nbytes, *box)


def _odd(tensor: torch.Tensor) -> str:
    """The kind of a tensor whose elements are not its own bytes in one piece, as users are told it; '' for others."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return "sparse"
    kind = type(tensor)
    # A subclass that dispatches by itself has its bytes elsewhere: DTensor, 8-bit optimizer states, NF4 weights.
    other = kind not in _PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return f"a {kind.__name__}" if other else ""


def fitting(own: torch.Tensor | None, info: TensorInfo, device: str, like: torch.Tensor | None = None) -> torch.Tensor:
    """`own` if the bytes of `info` can be written into it, else new storage on a device of type `device`."""
    dtype = dtype_of(info.dtype)
    if own is not None:
        here = local(own)
        fits = here.dtype == dtype and here.shape == info.shape and device_type(here) == device
        if fits and writable(here):
            return own
    if like is None:
        return torch.empty(info.shape, dtype=dtype, device=torch.device(device))
    return Like(like).empty(info, device)


class Like:
    """Makes new storage for what an optimizer keeps for a parameter: with thousands of tensors, half of the time to
    make one would be questions about the parameter."""

    __slots__ = ("_boxed", "_code", "_shape", "_tensor", "device")

    def __init__(self, tensor: torch.Tensor) -> None:
        here, self._boxed = local(tensor), box_of(tensor) != WHOLE
        self._tensor, self._code, self.device = tensor, CODES.get(here.dtype), device_type(here)
        self._shape = here.shape if writable(here) else None

    def empty(self, info: TensorInfo, device: str) -> torch.Tensor:
        """With the parameter's memory layout if it has its shape, on a device of type `device`. Raises ValueError for a
        box that is not the parameter's."""
        fits = device == self.device and info.shape == self._shape and (bool(info.of) or not self._boxed)
        if fits and info.dtype == self._code:
            return torch.empty_like(self._tensor)
        dtype = dtype_of(info.dtype)
        if fits:
            return torch.empty_like(self._tensor, dtype=dtype)
        if info.of:
            raise ValueError(f"{info.name} is a box of {list(info.of)}, and its parameter here is another one")
        if device == "cpu" and not info.shape:
            return torch.empty_like(_number(dtype))
        on = self._tensor.device if device == self.device else torch.device(device)
        return torch.empty(info.shape, dtype=dtype, device=on)


@functools.cache
def _number(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element: another like it is made in half the time that its description takes torch."""
    return torch.empty((), dtype=dtype)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage; 0: it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without storage
        return 0
