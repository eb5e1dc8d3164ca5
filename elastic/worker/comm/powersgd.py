"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): gradients of matrices are exchanged as products of two thin ones.

torch's hook keeps its matrices by bucket and in memory only, and issues collectives from callbacks, in an order that
gloo does not make equal on all ranks. Here they are kept by parameter, so they can be part of the state, and the
collectives of a bucket are made one after the other, in the order of the buckets.

With M the sum over the ranks of their weighted gradients: P = M Q is summed and orthogonalised, then Q = Mᵀ P is
summed, and all ranks apply P Qᵀ. Q begins the next step (warm start). What P Qᵀ lacks is added to the next gradient
(error feedback). Q is the same on all ranks and is kept in the state. The error of a rank exists on that rank only: to
save it would cost the traffic that is saved. So **all ranks drop their errors when the group is formed again**: that
loses what the compression has left out so far, and no step. Without error feedback a recovery is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.worker.link.misuse import MisuseRuntimeError, MisuseValueError


class PowerSGD:
    """A part of the State, and the value of `compress` in `job.ddp`.

        State(model=model, optimizer=…, compression=elastic.PowerSGD(model, matrix_rank=2))
        model = job.ddp(state.model, compress=state.compression)

    `matrix_rank`: columns of P and Q. `start_step`: so many exchanges of gradients before are plain. `min_rate`:
    parameters are compressed that need at most 1 / `min_rate` of their bytes then, others are summed as they are.
    Raises ValueError for other values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        matrix_rank: int = 1,
        start_step: int = 1000,
        min_rate: float = 2.0,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        if matrix_rank < 1:
            raise MisuseValueError(f"PowerSGD: matrix_rank = {matrix_rank}: at least 1")
        if start_step < 0:
            raise MisuseValueError(f"PowerSGD: start_step = {start_step}: at least 0")
        if not min_rate >= 1.0:
            raise MisuseValueError(f"PowerSGD: min_rate = {min_rate}: at least 1")
        self.kept = False
        """Whether it is part of a State."""
        self._start, self._feedback = start_step, error_feedback
        self._done = 0
        """Exchanges so far."""
        generator = torch.Generator().manual_seed(seed)
        self._q: dict[str, torch.Tensor] = {}
        for name, param in model.named_parameters():
            if param.requires_grad and saves(tuple(param.shape), matrix_rank, min_rate):
                rows = param.shape[0]
                drawn = torch.randn(min(rows, param.numel() // rows), matrix_rank, generator=generator)
                self._q[name] = drawn.to(param.device, torch.float32)
        self._names: dict[int, str] = {}
        self._errors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        self.kept = True
        return {"done": self._done, "q": dict(self._q)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if it was made for other parameters."""
        shapes = {name: tuple(q.shape) for name, q in self._q.items()}
        if (theirs := {name: tuple(q.shape) for name, q in state["q"].items()}) != shapes:
            raise MisuseValueError(f"PowerSGD: matrices of {theirs} were kept, and this model's are {shapes}")
        self._done = state["done"]
        self._q = {name: q.clone() for name, q in state["q"].items()}

    def begin(self, model: nn.Module) -> None:
        """A group has been formed: drop the errors. `model`: the one with the gradients. Raises ValueError if it is
        not the one that this was built for."""
        params = dict(model.named_parameters())
        if missing := [name for name in self._q if name not in params]:
            raise MisuseValueError(
                f"PowerSGD was built for another model: this one has no {missing[0]}; use one per model"
            )
        self._names = {id(param): name for name, param in params.items()}
        self._errors.clear()

    def exchange(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, last: bool, group: dist.ProcessGroup
    ) -> None:
        """Replace the gradients of one bucket by (an approximation of) their sum over the ranks of `group`.

        `pairs`: parameters and their gradients. `last`: the last bucket of this backward.
        """
        small: list[torch.Tensor] = []
        large: list[tuple[str, torch.Tensor]] = []
        for param, gradient in pairs:
            if (name := self._names.get(id(param))) is None:
                raise MisuseRuntimeError("one PowerSGD is used for two models: build one for each")
            if name in self._q and self._done >= self._start and gradient.is_contiguous():
                large.append((name, gradient))
            else:
                small.append(gradient)
        _sum(small, group)
        if large:
            self._compressed(large, group)
        if last:
            self._done += 1

    def _compressed(self, large: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
        matrices: list[torch.Tensor] = []
        for name, gradient in large:
            matrix = flat(gradient).float()
            if (error := self._errors.get(name)) is not None:
                matrix = matrix + error
            matrices.append(matrix)
        lefts = [matrix @ self._right(name, matrix) for (name, _), matrix in zip(large, matrices, strict=True)]
        _sum(lefts, group)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        _sum(rights, group)
        for (name, gradient), matrix, left, right in zip(large, matrices, lefts, rights, strict=True):
            whole = left @ right.t()
            # Gradients that are not finite, as a GradScaler tries them out, pass, and nothing of them is kept: one such
            # step would make all later ones NaN. The sum is the same on all ranks, and so is what they decide.
            finite = right.isfinite().all()
            if self._feedback:
                before = self._errors.get(name)
                before = torch.zeros_like(matrix) if before is None else before
                self._errors[name] = torch.where(finite, matrix - whole / group.size(), before)
            self._q[name] = torch.where(finite, right, self._right(name, matrix))
            flat(gradient).copy_(whole)

    def _right(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        return self._q[name].to(matrix.device)


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a matrix with at least as many rows as columns: Q, which is kept, has a row per column."""
    matrix = gradient.view(gradient.shape[0], -1)
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()


def saves(shape: tuple[int, ...], matrix_rank: int, min_rate: float) -> bool:
    """Whether P and Q of a gradient of this shape are smaller than the gradient by `min_rate`."""
    if len(shape) < 2 or 0 in shape:
        return False
    rows = shape[0]
    columns = 1
    for size in shape[1:]:
        columns *= size
    return (rows + columns) * matrix_rank * min_rate <= rows * columns


def _sum(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum over the ranks, in place: one collective per dtype."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        some = [tensor for tensor in tensors if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        dist.all_reduce(flat, group=group)
        start = 0
        for tensor in some:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
