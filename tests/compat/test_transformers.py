"""A Trainer under real agents: workers die at every place of its loop, and the result is that of a run without."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.agents import Job
from support.wait import eventually
from transformers import EarlyStoppingCallback

from elastic.contract.records.job_records import Phase
from elastic.contract.records.reasons import Code
from elastic.integrations import _trainer_recovery
from elastic.integrations._schedule import Schedule
from elastic.integrations._trainer_recovery import Recovery
from elastic.integrations.transformers import ElasticMixin, Trainer, TrainingArguments
from elastic.worker.link.misuse import MisuseRuntimeError, MisuseTypeError, MisuseValueError

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "hf_trainer.py"

pytestmark = [pytest.mark.etcd, pytest.mark.chaos]

KILLS = (
    "forward:1:4",
    "backward:0:7",
    "evaluation:1:10",
    "clipped:1:14",
    "optimizer:0:17",
    "save:0:20",
    "backward:1:27",
)


class Ran:
    """What a job wrote down, once it was over."""

    def __init__(self, job: Job) -> None:
        lines = job.lines()
        self.finals = {line["rank"]: line for line in lines if "final" in line}
        self.killed = [(line["killed"], line["rank"], line["step"]) for line in lines if "killed" in line]
        self.steps = [line for line in lines if "world_size" in line]
        self.pids = {line["pid"] for line in self.steps}
        log = (job.folder / "n0" / "agent.log").read_text().splitlines()
        events = [json.loads(line) for line in log if line.startswith("{")]
        self.replaced = [event for event in events if event["event"] in ("worker.kill", "worker.failed")]
        """Workers that the agent ended, or that ended themselves."""
        self.zygotes = [event for event in events if event["event"].startswith("zygote.")]
        self.incidents = [i for i in job.incidents() if i.kind != "late exit"]
        logs = [path.read_text().splitlines() for path in sorted((job.folder / "n0" / "logs").glob("*.log"))]
        self.said = [line for log in logs for line in log if line.startswith("elastic:")]
        """By elastic, in the output of the workers."""
        self.left_behind = [path.name for path in job.record.glob("elastic-*")]


def run(*, workers: int = 2, kills: tuple[str, ...] = (), more: dict[str, Any] | None = None, **args: Any) -> Ran:
    given = {"record": "record", "kill": ",".join(kills), "more": json.dumps(more or {}), **args}
    with Job(nodes="1", workers=workers, script=SCRIPT, args=given) as job:
        over = eventually(lambda: job.state().phase.over and job.state(), 200.0, "the job is over", every_s=0.2)
        assert over.phase is Phase.SUCCEEDED, over.reason
        eventually(
            lambda: sum("final" in line for line in job.lines()) == workers, 30.0, "what follows train() is done"
        )
        return Ran(job)


def check_recovered(ran: Ran, whole: Ran, kills: tuple[str, ...], workers: int = 2) -> None:
    """Every kill was done, lost no step and no survivor, and the result is that of the undisturbed run."""
    assert sorted(ran.killed) == sorted((p, int(r), int(s)) for p, r, s in (k.split(":") for k in kills))
    assert len(ran.incidents) == len(kills), ran.incidents
    assert [(i.steps_lost, i.restored_from) for i in ran.incidents] == [(0, "live")] * len(kills), ran.incidents
    assert not ran.replaced, ran.replaced
    assert [e["event"] for e in ran.zygotes] == ["zygote.up"], ran.zygotes  # fit to fork, with the framework in it
    assert "elastic.integrations.transformers" in ran.zygotes[0]["preloaded"]
    assert not ran.said, "of replicas that differ, as a rule"
    assert not ran.left_behind, "temporary files of workers that were killed"
    assert len(ran.pids) == workers + len(kills)  # one more process for each that died: no survivor was replaced
    for rank, final in whole.finals.items():
        for key in ("final", "at", "best", "patience", "counted", "saves"):
            assert ran.finals[rank][key] == final[key], (rank, key)
    assert ran.finals.keys() == whole.finals.keys() == set(range(workers))


@pytest.mark.timeout(500)
def test_a_trainer_survives_a_death_at_every_place_of_its_loop() -> None:
    whole, ran = run(), run(kills=KILLS)
    check_recovered(ran, whole, KILLS)
    ours, theirs = ran.finals[0]["history"], whole.finals[0]["history"]
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        # The part of a window's training loss that a dead rank had is taken from the others.
        assert {k: v for k, v in mine.items() if "loss" not in k or k == "eval_loss"} == {
            k: v for k, v in other.items() if "loss" not in k or k == "eval_loss"
        }
        assert mine.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("lora", {}),
        ("stream", {}),
        ("datasets", {}),
        ("seq2seq", {}),
        ("causal", {"bf16": True, "lr_scheduler_type": "reduce_lr_on_plateau", "weight_decay": 0.1}),
        ("causal", {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1, "eval_steps": 5,
                    "save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"}),
    ],
    ids=["lora", "stream", "datasets", "seq2seq", "bf16-plateau", "by-length-epochs"],
)  # fmt: skip
@pytest.mark.timeout(500)
def test_a_trainer_recovers_with_other_models_data_and_schedules(kind: str, more: dict[str, Any]) -> None:
    kills = ("evaluation:0:10", "backward:1:12")
    whole = run(kind=kind, more=more, steps=20)
    check_recovered(run(kind=kind, more=more, steps=20, kills=kills), whole, kills)


@pytest.mark.timeout(500)
def test_a_token_weighted_step_is_the_same_in_any_world() -> None:
    """150 samples of different length, in steps of 16: no world divides the last of an epoch."""
    ran = {workers: run(workers=workers, steps=12, batch=16, dropout=0.0) for workers in (1, 2, 3)}
    norms = {workers: r.finals[0]["norm"] for workers, r in ran.items()}
    losses = {w: [line["loss"] for line in r.finals[0]["history"] if "loss" in line] for w, r in ran.items()}
    assert norms[2] == pytest.approx(norms[1], rel=1e-6)
    assert norms[3] == pytest.approx(norms[1], rel=1e-6)
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)


FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


@pytest.mark.timeout(500)
def test_a_trainer_with_fsdp2_is_bit_identical_after_deaths() -> None:
    kills = ("forward:1:4", "evaluation:0:10", "clipped:1:14", "optimizer:0:17", "save:1:20", "evaluation:0:30")
    whole, ran = run(more=FSDP), run(more=FSDP, kills=kills)
    assert sorted(ran.killed) == sorted((p, int(r), int(s)) for p, r, s in (k.split(":") for k in kills))
    assert [(i.kind, i.detail.code) for i in ran.incidents] == [("exit", Code.KILLED)] * len(kills)
    assert all(i.steps_lost is not None for i in ran.incidents), "what it cost"
    assert len(ran.said) == 1 + sum(":0:" in kill for kill in kills), "each process that begins as rank 0"
    assert all("a lost worker costs the steps since the last snapshot in memory" in line for line in ran.said)
    assert not ran.replaced, ran.replaced
    assert len(ran.pids) == 2 + len(kills), "a survivor was replaced"
    assert ran.finals.keys() == whole.finals.keys() == {0, 1}
    for rank, final in whole.finals.items():
        for key in ("final", "at", "best", "patience", "counted", "saves"):
            assert ran.finals[rank][key] == final[key], (rank, key)
    ours, theirs = ([{k: v for k, v in line.items() if k not in ("loss", "train_loss", "total_flos")} for line in of]
                    for of in (ran.finals[0]["history"], whole.finals[0]["history"]))  # fmt: skip
    assert [line for line in ours if "eval_loss" in line] == [line for line in theirs if "eval_loss" in line]
    # The training loss of the very step that it went back to is of no window, and is left out.
    assert all(line in theirs for line in ours)
    assert whole.finals[0]["final"] == whole.finals[1]["final"]


@pytest.mark.timeout(300)
def test_label_smoothing_shifts_the_labels_of_a_causal_model_with_fsdp2_too() -> None:
    smooth = {"label_smoothing_factor": 0.1}
    whole, sharded = (run(more=more | smooth, steps=10, dropout=0.0).finals[0] for more in ({}, FSDP))
    losses = [[line[key] for line in each["history"] for key in ("loss", "eval_loss") if key in line]
              for each in (whole, sharded)]  # fmt: skip
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert sharded["norm"] == pytest.approx(whole["norm"], rel=1e-6)


@pytest.mark.timeout(300)
def test_callbacks_begin_anew_with_a_training_that_has_lost_all_state() -> None:
    """A death in the first step: the survivor goes back to `setup`, and its callbacks as well."""
    ran = run(more=FSDP, steps=4, kills=("optimizer:1:0",))
    assert [i.restored_from for i in ran.incidents] == ["setup"]
    assert len(ran.pids) < 4, "no process survived"
    assert [final["counted"]["steps"] for final in ran.finals.values()] == [4, 4]


@pytest.mark.timeout(300)
def test_a_callback_whose_state_is_of_one_rank_is_named() -> None:
    said = run(steps=4, counts="first").said
    assert len(said) == 1, said
    assert "after step 1 the state of the callback Counted is not the same on each rank (rank 1 from rank 0)" in said[0]


def test_training_changes_the_arguments_of_a_callback_and_the_script_chooses_the_others() -> None:
    """A job is started again by a script with another patience."""

    class Worn(EarlyStoppingCallback):
        def __init__(self, patience: int, steps: int = 0) -> None:
            super().__init__(patience)
            self.steps = steps

        def state(self) -> Any:
            return {"args": {"patience": self.early_stopping_patience, "steps": self.steps}, "attributes": {}}

    def trained(callback: Any) -> Any:
        trainer: Any = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[callback]))
        trainer._began = _trainer_recovery.states_now(trainer)
        return trainer

    before, after, other = trained(first := Worn(3)), trained(second := Worn(5)), trained(third := Worn(2, 9))
    first.steps = 7
    held = json.loads(json.dumps(_trainer_recovery._callbacks_now(before)))
    second.steps = 8  # in a step that was not committed
    for trainer in (after, other):
        _trainer_recovery._put_back(trainer, held)
    assert (second.early_stopping_patience, second.steps) == (5, 7)
    assert (third.early_stopping_patience, third.steps) == (2, 7)
    with pytest.raises(MisuseTypeError, match=r"^the callback Worn cannot be made of the args"):
        _trainer_recovery._put_back(other, {"Worn": [{"args": {"none": 1}}]})


def test_a_trainer_with_fsdp_of_another_kind_or_with_a_model_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    def made(version: int = 2, **model: Any) -> None:
        args = TrainingArguments(str(tmp_path), fsdp=True, fsdp_config={"version": version}, report_to=[], use_cpu=True)
        Trainer(args=args, train_dataset=[], **model).train(resume_from_checkpoint=str(tmp_path))

    with pytest.raises(MisuseValueError, match="FSDP2 alone: version=2"):
        made(version=1, model_init=Mean)
    with pytest.raises(MisuseValueError, match="give elastic's Trainer model_init="):
        made(model=Mean())
    with pytest.raises(MisuseValueError, match="no resume_from_checkpoint"):
        made(model_init=Mean)


@pytest.mark.parametrize(("committed", "loss"), [(True, 5.0), (False, 2.0)])
def test_losses_of_a_step_count_once_it_is_committed_and_not_before(committed: bool, loss: float) -> None:
    """A commit ends a generation by raising, before the step is committed or behind that; else it is done again."""

    def commit(kept: Any, **_: Any) -> None:
        kept.step += committed
        raise InterruptedError

    trainer: Any = object.__new__(Trainer)
    trainer.state, trainer.current_flos = SimpleNamespace(global_step=4), 1.0
    trainer._own = 3, torch.tensor(2.0), 0.5
    trainer._recovery = SimpleNamespace(hold=lambda *_: None)
    run = SimpleNamespace(job=SimpleNamespace(commit=commit), kept=SimpleNamespace(step=3), loss=None)
    with pytest.raises(InterruptedError):
        trainer._commit(run, torch.tensor(5.0), None, None)
    assert trainer._own[1] == loss


@pytest.mark.parametrize(("step", "loss", "logged"), [(8, 6.0, 5), (6, 0.0, 6)], ids=["recovered", "rolled-back"])
def test_the_logged_window_has_no_losses_of_steps_that_were_undone(step: int, loss: float, logged: int) -> None:
    """After a rollback to step 6 the sums up to step 8 would count its steps twice."""
    trainer = SimpleNamespace(
        _own=(8, torch.tensor(6.0), 0.5), _tr_loss=torch.tensor(0.0), _globalstep_last_logged=step,
        _total_loss_scalar=0.0, _initial_global_step=step, current_flos=0.0,
    )  # fmt: skip
    recovery = Recovery(trainer, None, Schedule(), None, None)
    run: Any = SimpleNamespace(job=SimpleNamespace(device=torch.device("cpu")), kept=SimpleNamespace(step=step))
    recovery._losses(run, {"total_loss": 9.0, "logged_step": 5, "initial_step": 0})
    assert trainer._tr_loss == loss
    assert trainer._globalstep_last_logged == logged


class Mean(torch.nn.Module):
    """A model of one parameter, which keeps the samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += x.tolist()
        return {"loss": (self.weight - x).square().mean()}


def own_loader(self: Any) -> Any:
    return torch.utils.data.DataLoader(self.train_dataset, batch_size=2)


def stock_loader(self: Any) -> Any:
    """As DPO: it prepares the data first."""
    self.train_dataset = [
        {**each, "x": each["x"] % 10 + 10.0} for each in self.train_dataset
    ]  # as DPO prepares its data
    return super(type(self), self).get_train_dataloader()


def second_half(self: Any, train_dataset: Any = None) -> Any:
    return [2, 3] * 2


def seen_by(kind: type, folder: pathlib.Path) -> list[int]:
    data = [{"x": float(number), "labels": 0.0} for number in range(6)]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    model = Mean()
    kind(model, args, train_dataset=data).train()
    return [int(each) for each in model.seen]


@pytest.mark.parametrize("bases", [(Trainer,), (ElasticMixin, transformers.Trainer)], ids=["trainer", "mixin"])
def test_a_training_loader_of_a_subclass_is_used_or_refused_and_never_dropped(
    bases: tuple[type, ...], tmp_path: pathlib.Path
) -> None:
    *first, stock = bases
    balanced = type("Balanced", (stock,), {"get_train_dataloader": own_loader})
    with pytest.raises(MisuseTypeError, match=r"^Balanced\.get_train_dataloader returns a loader of its own"):
        seen_by(type("Mine", (*first, balanced), {}), tmp_path)
    sampled = type("Sampled", (stock,), {"_get_train_sampler": second_half})
    assert sorted(seen_by(type("Mine", (*first, sampled), {}), tmp_path)) == [2, 2, 3, 3]
    prepared = type("Mine", bases, {"get_train_dataloader": stock_loader})
    assert set(seen_by(prepared, tmp_path)) < {10, 11, 12, 13, 14, 15}


def test_a_second_training_in_one_process_is_refused() -> None:
    trainer: Any = object.__new__(Trainer)
    trainer._managed = True
    with pytest.raises(MisuseRuntimeError, match=r"a process trains once\. Make the second training a job of its own"):
        trainer.train()


def test_a_sampling_that_depends_on_the_world_is_refused_with_what_to_write(tmp_path: pathlib.Path) -> None:
    args = TrainingArguments(str(tmp_path), train_sampling_strategy="batch_rebalance", report_to=[], use_cpu=True)
    with pytest.raises(MisuseValueError, match="Write 'group_by_length'"):
        Trainer(Mean(), args, train_dataset=[])
