"""What a position in the data depends on: compared when the job goes on, and refused by name where it is another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.forming import formed
from support.killed import copied, received
from support.pairs import Pairs
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

from elastic.worker.job.job import Job
from elastic.worker.link.link import Link
from elastic.worker.link.misuse import MisuseError
from elastic.worker.link.session import GenerationEnded
from elastic.worker.state.state import State

Loop = Callable[[Job, State], Iterator[Any]]


def setup(_: Job) -> State:
    model = nn.Linear(4, 1, dtype=torch.float64)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def new_job(state: State, rank: int = 0, world_size: int = 1) -> Job:
    job = Job(name="job", device=torch.device("cpu"), local_rank=0, link=Link())
    job.enter(rank=rank, world_size=world_size, generation=1, checkpoint_scheduler=None, state=state)
    state.begin()
    return job


def begun() -> tuple[Job, State]:
    state = setup(None)  # type: ignore[arg-type]
    return new_job(state), state


def goes_on(state: State, world_size: int = 1) -> tuple[Job, State]:
    """The job in another process, from a checkpoint of `state`."""
    other = received(setup, new_job(setup(None)), copied(state))  # type: ignore[arg-type]
    return new_job(other, world_size=world_size), other


def take(job: Job, state: State, loop: Loop, count: int = 1000) -> list[Any]:
    found = []
    if count:
        for batch in loop(job, state):
            found.append(batch)
            job.commit(state)
            if len(found) == count:
                break
    return found


def of(size: int = 60, **options: Any) -> Loop:
    """A loop over the first `size` samples, of 8 a step unless told otherwise."""
    options = {"batch_size": 8, "epochs": 2} | options
    return lambda job, state: job.batches(Subset(Pairs(), range(size)), state, **options)


class Own:
    """A sampler that yields `order(epoch)`."""

    def __init__(self, order: Callable[[int], list[Any]]) -> None:
        self.order, self.epoch = order, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order(self.epoch))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (of(batch_size=4), "batch_size = 4 rather than 8"),
        (of(batch_size=16), "batch_size = 16 rather than 8"),
        (of(batch_size=60, epochs=1), "batch_size = 60 rather than 8"),  # and nothing is left to be taken
        (of(50), "samples = 50 rather than 60"),
        (of(seed=1), "seed = 1 rather than 0"),
        (of(shuffle=False), "shuffle = False rather than True"),
        (of(drop_last=True), "drop_last = True rather than False"),
        (of(sampler=range(60)), "sampler = 'range' rather than None"),
        (lambda job, state: job.steps(range(60), state), "loop = 'steps' rather than None"),
    ],
)
def test_other_data_or_numbers_are_refused_with_both_values_when_the_job_goes_on(other: Loop, said: str) -> None:
    job, state = begun()
    take(job, state, of(), 3)
    job, state = goes_on(state)

    def train() -> None:
        take(job, state, other)
        job.left(state)

    with pytest.raises(MisuseError, match=said):
        train()
    assert state.step == 3, "a step of another place was committed"


@pytest.mark.parametrize("step", [0, 3, 8, 16])
def test_the_same_loop_goes_on_and_may_go_further(step: int) -> None:
    job, state = begun()
    take(job, state, of(), step)
    job, state = goes_on(state)
    assert len(take(job, state, of(epochs=3, num_workers=0))) == 24 - step
    job.left(state)


def test_a_checkpoint_from_before_has_no_numbers_and_is_read() -> None:
    job, state = begun()
    take(job, state, of(), 3)
    table, extra, tensors = copied(state)
    assert extra.pop("progress")
    other = received(setup, new_job(setup(None)), (table, extra, tensors))  # type: ignore[arg-type]
    assert len(take(new_job(other), other, of(batch_size=30))) == 1


def test_a_batch_to_look_at_and_loops_made_anew_are_no_change() -> None:
    for step in range(1, 5):
        job, state = begun()

        def script(job: Job, state: State, stop: int) -> None:
            next(of(batch_size=1)(job, state))  # before the loop
            while state.step < stop:
                next(of(batch_size=4 + state.step % 2)(job, state))
                job.commit(state)

        script(job, state, step)
        job, state = goes_on(state)
        script(job, state, 6)


def test_loops_made_anew_at_each_step_leave_nothing_behind() -> None:
    job, state = begun()
    for _ in range(30):
        next(of(epochs=9)(job, state))
        job.commit(state)
    assert len(state.data_progress._begun) == 1
    assert "progress" not in state.extra()


def test_data_may_grow_between_two_rounds_and_on_demand() -> None:
    job, state = begun()
    rounds = job.epochs(state, 3)
    assert next(rounds) == 0
    take(job, state, of(20, epochs=None))
    assert next(rounds) == 1
    assert state.step == 4
    job, state = goes_on(state)
    assert next(rounds := job.epochs(state, 3)) == 1
    assert len(take(job, state, of(30, epochs=None), 2)) == 2
    job, state = goes_on(state)
    next(rounds := job.epochs(state, 3))
    with pytest.raises(MisuseError, match="samples = 40 rather than 30"):
        take(job, state, of(40, epochs=None))
    job, state = goes_on(state)
    next(rounds := job.epochs(state, 3))
    assert len(take(job, state, of(40, epochs=None, allow_changed=True))) == 3


def test_a_second_loop_that_can_never_yield_is_refused() -> None:
    job, state = begun()
    take(job, state, of(steps=10))
    with pytest.raises(MisuseError, match=r"ends at step 10 begins at step 10, .* job\.epochs"):
        take(job, state, of(steps=10))  # as in `for epoch in range(30)` around job.batches(…) of one epoch
    with pytest.raises(MisuseError, match=r"ends at step 5 begins at step 10, .* job\.epochs"):
        take(job, state, of(30, epochs=None, steps=5))
    job, state = goes_on(state)
    take(job, state, of(epochs=None, steps=10))
    assert len(take(job, state, of(30, epochs=None, steps=15))) == 5


def test_loops_made_anew_come_to_an_end() -> None:
    job, state = begun()
    while next(of()(job, state), None) is not None:
        job.commit(state)
    assert state.step == 16


def test_a_loop_that_was_left_in_a_round_is_of_that_round() -> None:
    job, state = begun()
    kept, taken = [], []
    for _ in job.epochs(state, 3):
        kept.append(loop := of(epochs=None)(job, state))  # not closed by the break
        for batch in loop:
            job.commit(state)
            taken.append(batch)
            if state.step % 3 == 2:
                break
    whole = take(*begun(), of(epochs=3))
    assert [b.indices for b in taken] == [whole[n].indices for n in (0, 1, 8, 9, 16, 17)]


def test_each_round_has_the_whole_epoch_of_its_number() -> None:
    job, state = begun()
    rounds = [[b.indices for b in take(job, state, of(epochs=None))] for _ in job.epochs(state, 3)]
    whole = [b.indices for b in take(*begun(), of(epochs=3))]
    assert rounds == [whole[:8], whole[8:16], whole[16:]]
    assert state.step == 27


def test_modes_that_the_end_of_a_round_sets_are_not_those_of_the_next_loop() -> None:
    job, state = begun()
    for epoch in job.epochs(state, 3):
        if epoch:
            break  # a rank is lost before the first commit of the second epoch
        state.model.train()
        take(job, state, of(epochs=None))
        state.model.eval()
    job, state = goes_on(state)
    state.forget_gradients()
    rounds = job.epochs(state, 3)
    assert next(rounds) == 1
    state.model.train()
    next(of(epochs=None)(job, state))
    assert state.model.training


def test_streams_are_refused_in_a_round() -> None:
    job, state = begun()
    for _ in job.epochs(state, 1):
        with pytest.raises(MisuseError, match=r"job\.streams within job\.epochs"):
            job.streams(lambda n, count: [n], state, count=1, batch_size=1, steps=1)


# ── samplers ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_rank_has_its_part_of_the_samplers_order(world_size: int, drop_last: bool) -> None:
    order = Own(lambda epoch: [(7 * i + epoch) % 60 for i in range(50)])
    taken: list[list[Any]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        state = setup(None)  # type: ignore[arg-type]
        taken[rank] = take(
            new_job(state, rank, world_size), state, of(sampler=order, drop_last=drop_last, num_workers=0)
        )
    steps = list(zip(*taken, strict=True))
    assert len(steps) == (12 if drop_last else 14)
    for epoch in range(2):
        whole = [i for step in steps for batch in step if batch.epoch == epoch for i in batch.indices]
        assert whole == order.order(epoch)[: 48 if drop_last else 50]
    assert all(sum(batch.weight for batch in step) == pytest.approx(1) for step in steps)
    assert [step[0].last_of_epoch for step in steps] == [
        n % (len(steps) // 2) == len(steps) // 2 - 1 for n in range(len(steps))
    ]


def drawn_batches(epoch: int) -> list[list[int]]:
    sizes = [random.randrange(1, 9) for _ in range(5 + epoch)]
    return [random.sample(range(60), size) for size in sizes]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_batch_sampler_go_on_where_they_were(workers: int) -> None:
    def loop(job: Job, state: State) -> Iterator[Any]:
        return of(batch_size=None, batch_sampler=Own(drawn_batches), epochs=3, num_workers=workers)(job, state)

    job, state = begun()
    whole = [(batch.indices, batch.epoch, batch.x.tolist()) for batch in take(job, state, loop)]
    assert Counter(epoch for _, epoch, _ in whole) == {0: 5, 1: 6, 2: 7}
    job, state = begun()
    for stop in (1, 4, 2, 1, 3):
        before = state.step
        found = take(job, state, loop, stop)
        assert [(b.indices, b.epoch, b.x.tolist()) for b in found] == whole[before : before + stop]
        job, state = goes_on(state)


def test_a_sampler_with_another_order_when_the_job_goes_on_is_refused() -> None:
    first = list(range(60))
    job, state = begun()
    take(job, state, of(sampler=Own(lambda _: first)), 3)
    job, state = goes_on(state)
    with pytest.raises(MisuseError, match="Own gives another order for epoch 0 than before"):
        take(job, state, of(sampler=Own(lambda _: first[::-1])))
    assert state.step == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": DistributedSampler(Pairs(), 2, 0)}, r"DistributedSampler\(num_replicas=2\)"),
        ({"sampler": iter(range(9))}, "can be read once only"),
        ({"sampler": []}, "gives nothing in epoch 0"),
        ({"batch_size": None}, "a batch_size, of all ranks together, or a batch_sampler"),
        ({"batch_sampler": [[1]]}, "batch_sampler excludes"),
        ({"batch_size": None, "batch_sampler": [1, 2]}, "yields single indices"),
        ({"batch_size": None, "batch_sampler": [[1], []]}, "empty batch"),
        ({"batch_size": 61, "drop_last": True}, "no batch is full"),
        ({"commits": 0}, "commits = 0: at least 1"),
        ({"sampler": Own(lambda _: (i % 60 for i in iter(int, 1)))}, "has no end"),  # type: ignore[dict-item]
    ],
)
def test_what_gives_no_batches_is_refused(options: dict[str, Any], said: str) -> None:
    job, state = begun()
    with pytest.raises(MisuseError, match=said):
        take(job, state, of(**options))


def test_an_endless_sampler_may_be_given_a_number_of_steps() -> None:
    job, state = begun()
    endless = Own(lambda _: (random.randrange(60) for _ in iter(int, 1)))  # type: ignore[arg-type,return-value]
    assert len(take(job, state, of(sampler=endless, epochs=None, steps=5))) == 5


def test_each_step_of_a_batch_has_it_as_it_was_read() -> None:
    job, state = begun()
    seen = []
    for batch in of(commits=2, epochs=1)(job, state):
        seen.append((batch.part, batch.indices, batch.x.clone()))
        batch.x.zero_()
        job.commit(state)
    assert [part for part, _, _ in seen] == [0, 1] * 8
    for (_, one, x), (_, other, again) in zip(seen[::2], seen[1::2], strict=True):
        assert one == other
        assert torch.equal(x, again)


# ── a loader of the script's own ────────────────────────────────────────────────────────────────────────────


class Drawing(torch.utils.data.Dataset[Any]):
    """Draws for each sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), random.random(), torch.rand(()).item()], dtype=torch.float64)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(9):
            yield torch.tensor([float(index), random.random()])


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Drawing(), batch_size=5, shuffle=True),
    "a generator of its own": lambda: DataLoader(Drawing(), batch_size=5, shuffle=True, generator=torch.Generator()),
    "a rank's part": lambda: DataLoader(Drawing(), 5, sampler=DistributedSampler(Drawing(), 2, 1)),
    "processes": lambda: DataLoader(Drawing(), batch_size=5, sampler=RandomSampler(Drawing()), num_workers=2),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "single samples": lambda: DataLoader(Drawing(), batch_size=None, shuffle=True),
    "a list": lambda: [torch.ones(1) * i for i in range(5)],
    "a generator": lambda: (torch.rand(2) for _ in range(30)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_goes_on_where_it_was_with_the_draws_of_each_step(name: str) -> None:
    limits: dict[str, Any] = {"steps": 12} if name == "a generator" else {"epochs": 2}

    def rest(job: Job, state: State, count: int = 1000) -> list[Any]:
        found = []
        for item in job.steps(LOADERS[name](), state, **limits):
            found.append((item.tolist(), random.random(), torch.rand(()).item()))  # and the body's draws
            job.commit(state)
            if len(found) == count:
                break
        return found

    job, state = begun()
    whole = rest(job, state)
    job, state = begun()
    random.seed(99)
    for count in (1, 2, 3):
        before = state.step
        assert rest(job, state, count) == whole[before : before + count]
        job, state = goes_on(state)
    assert rest(job, state) == whole[6:]


def test_a_generator_that_was_begun_before_is_refused() -> None:
    job, state = begun()
    once = (i for i in range(9))
    take(job, state, lambda job, state: job.steps(once, state, steps=20), 3)
    job.enter(rank=0, world_size=1, generation=2, checkpoint_scheduler=None, state=state)
    state.begin()
    with pytest.raises(MisuseError, match="can be read once only, and was begun before"):
        take(job, state, lambda job, state: job.steps(once, state, steps=20))
    job, state = begun()
    with pytest.raises(MisuseError, match="can be read once only, and was begun before"):
        take(job, state, lambda job, state: job.steps(iter([1, 2]), state, steps=20))


def test_a_loader_of_another_length_is_refused_and_of_another_world_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    def part(world_size: int, size: int = 60) -> Loop:
        data = Subset(Pairs(), range(size))
        return lambda job, state: job.steps(DataLoader(data, 5, sampler=DistributedSampler(data, world_size, 0)), state)

    state = setup(None)  # type: ignore[arg-type]
    take(new_job(state, world_size=2), state, part(2), 3)
    job, other = goes_on(state, world_size=2)
    with pytest.raises(MisuseError, match="DataLoader has 5 batches, and had 6 before"):
        take(job, other, part(2, 50))
    assert capfd.readouterr().err == ""
    job, other = goes_on(state)
    assert len(take(job, other, part(1))) == 9
    assert "was one of 2 ranks in this epoch, and is one of 1" in capfd.readouterr().err


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


def unlike(rank: int, world_size: int, port: int, what: str) -> tuple[str, int]:
    group = formed(rank, world_size, port)
    state = setup(None)  # type: ignore[arg-type]
    job = new_job(state, rank, world_size)
    said, other = "", rank == 2
    try:
        match what:
            case "length":
                take(job, state, of(50 if other else 60))
            case "sampler":
                take(job, state, of(sampler=Own(lambda _: list(range(60))[:: -1 if other else 1])))
            case "loader":
                take(job, state, lambda job, state: job.steps(range(9 + other), state))
            case "round":
                for epoch in job.epochs(state, 3):
                    take(job, state, of(60 - (epoch == 1 and other), epochs=None))
            case "same":
                for _ in job.epochs(state, 2):
                    take(job, state, of())
    except MisuseError as error:
        said = str(error)
    group.close()
    return said, state.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said", "step"),
    [
        ("length", "samples = 60 on rank 0 and 50 on rank 2", 1),
        ("sampler", "order = ", 1),
        ("loader", "length = 9 on rank 0 and 10 on rank 2", 1),
        ("round", "samples = 60 on rank 0 and 59 on rank 2", 10),
        ("same", "", 34),
    ],
)
def test_ranks_that_see_other_data_are_refused_at_their_first_step(what: str, said: str, step: int) -> None:
    (first, at), *others = run_ranks(unlike, world_size=3, what=what)
    assert said in first
    assert at == step
    assert all(other == [first, at] for other in others)


@pytest.mark.parametrize("then", ["ends", "another loop"])
def test_a_loop_of_a_round_that_is_left_after_a_commit_is_refused(then: str) -> None:
    """A survivor that entered again would take one more of its batches: other weights, and 0 steps lost."""
    job, state = begun()

    def train() -> None:
        for _ in job.epochs(state, 2):
            take(job, state, of(), 3)
            if then == "another loop":
                take(job, state, of(16))

    with pytest.raises(MisuseError, match="break at the top of its body"):
        train()


def test_a_loop_of_a_round_may_be_left_at_the_top_or_by_its_limit_and_by_the_end_of_a_generation() -> None:
    job, state = begun()
    for _ in job.epochs(state, 2):
        for _batch in of()(job, state):
            if state.step % 4 == 3:
                break
            job.commit(state)
        take(job, state, of(steps=2), 2)

    def train() -> None:
        for _ in job.epochs(state, 1):
            for _batch in of()(job, state):
                job.commit(state)
                raise GenerationEnded("a rank is lost")

    with pytest.raises(GenerationEnded):
        train()
    job.enter(rank=0, world_size=1, generation=2, checkpoint_scheduler=None, state=state)
    for _ in job.epochs(state, 1):
        take(job, state, of())


@pytest.mark.parametrize("where", ["in the body", "before the rounds", "in the first turn"])
def test_a_change_at_the_top_of_a_round_is_refused_in_the_first_one(where: str) -> None:
    job, state = begun()
    group = state.optimizer.param_groups[0]

    def train() -> None:
        group["lr"] *= 0.5 if where == "before the rounds" else 1.0
        for _ in job.epochs(state, 1):
            group["lr"] *= 0.5 if where == "in the body" else 1.0
            for _batch in of()(job, state):
                group["lr"] *= 0.5 if where == "in the first turn" else 1.0
                job.commit(state)

    if where == "in the body":
        with pytest.raises(MisuseError, match=r"state\.optimizer was changed .* moves into the inner loop"):
            train()
        assert state.step == 0
    else:
        train()
