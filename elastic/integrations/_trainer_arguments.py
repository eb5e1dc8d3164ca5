"""TrainingArguments of a Trainer whose process group comes later, and which of them cannot be recovered in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from accelerate.state import PartialState
from transformers.training_args import ParallelMode

from elastic.worker.link.misuse import MisuseTypeError, MisuseValueError

from . import _place


class Alone:
    """TrainingArguments that look for no process group: it is formed later, and several times."""

    global_train_batch_size: int
    use_cpu: bool
    fsdp: Any
    fsdp_config: Any
    taken = False
    """A Trainer has them. With FSDP it asks before whether it is distributed: it will be."""
    train_sampling_strategy: str

    def __post_init__(self) -> None:
        if self.global_train_batch_size < 0:
            raise MisuseValueError(
                f"global_train_batch_size = {self.global_train_batch_size}: a number of samples, 0: not set"
            )
        device = _place.first_device(use_cpu=self.use_cpu)
        _place.alone(device)
        settle(self, device)
        super().__post_init__()  # type: ignore[misc]
        if self.fsdp and (self.fsdp_config.get("xla") or int(self.fsdp_config.get("version", 2)) != 2):
            raise MisuseValueError("fsdp_config: elastic's Trainer shards by FSDP2 alone: version=2, without xla")

    @property
    def parallel_mode(self) -> Any:
        before = self.fsdp and not self.taken
        return ParallelMode.DISTRIBUTED if before else super().parallel_mode  # type: ignore[misc]


def settle(args: Any, device: torch.device) -> None:
    """Give `args` the device and the place that accelerate has; TrainingArguments asks for them only once."""
    args.__dict__["_setup_devices"] = device
    args.distributed_state = PartialState()
    args._n_gpu = 0 if device.type == "cpu" else 1


_GLOBAL = {"help": "Samples in an optimizer step over all ranks, for any world size. 0: as in the first world."}


@dataclass
class TrainingArguments(Alone, transformers.TrainingArguments):  # type: ignore[misc]
    """transformers.TrainingArguments, and `global_train_batch_size`: samples in an optimizer step over all ranks, the
    same for any world size. Default: per_device_train_batch_size × gradient_accumulation_steps × the first world size.
    """

    global_train_batch_size: int = field(default=0, metadata=_GLOBAL)


@dataclass
class Seq2SeqTrainingArguments(Alone, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """The same for transformers.Seq2SeqTrainingArguments."""

    global_train_batch_size: int = field(default=0, metadata=_GLOBAL)


def refuse(args: Any) -> None:
    """Raises TypeError or ValueError for arguments that cannot be recovered in place."""
    if not isinstance(args, Alone):
        raise MisuseTypeError(
            f"args is {type(args).__name__} of transformers: import TrainingArguments from "
            "elastic.integrations.transformers as well"
        )
    refused = {
        "deepspeed": "each rank has a part of the state only",
        "parallelism_config": "each rank has a part of the state only",
        "auto_find_batch_size": "the global batch must keep its size; set per_device_train_batch_size",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise MisuseValueError(f"{name} = {getattr(args, name)!r}: not supported by elastic's Trainer: {why}")
    if args.train_sampling_strategy == "batch_rebalance":
        raise MisuseValueError(
            "train_sampling_strategy = 'batch_rebalance': its order depends on the world size. Write "
            "'group_by_length', which puts samples of like length together as well, or 'random'"
        )
