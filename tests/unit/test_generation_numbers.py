"""Which number the leader gives to the next generation, and when it looks for the newest checkpoint first."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support import says
from support.jobs import Machine, broken, generation, member, place, policy, view

from elastic.contract.job.spec import Checkpoint, JobSpec
from elastic.contract.records.decoding import Member
from elastic.recovery.facts.view import JobView
from elastic.recovery.machine.effects import Effect, FindNewestSaved, Publish, PutState
from elastic.recovery.machine.events import Joined, NewestSaved, Start, Tick, Viewed
from elastic.recovery.machine.turn import ASK_AGAIN_S

US = member("a", 1, ready=(0,))


def with_folder(*, shared: bool = True) -> Machine:
    """An agent whose worker is ready, in no generation yet."""
    checkpoint = Checkpoint(dir="/checkpoints", shared=shared)
    machine = Machine(
        policy(spec=JobSpec(name="job", script="x.py", nodes="1:2", join_wait_s=0, checkpoint=checkpoint))
    )
    machine.take(Start(), Joined(), says.ready(0, 1))
    return machine


def seen(machine: Machine, *members: Member, **more: object) -> JobView:
    return replace(view(*members, spec=machine.agent.policy.spec), **more)  # type: ignore[arg-type]


def asked(effects: list[Effect]) -> list[bool]:
    """Whether at the remote end too, for each look."""
    return [effect.remote for effect in effects if isinstance(effect, FindNewestSaved)]


def numbers(effects: list[Effect]) -> list[int]:
    return [effect.number for effect in effects if isinstance(effect, Publish)]


def saved_on(node: str, newest: int) -> Member:
    return Member(msgspec.structs.replace(member(node).record, saved_generation=newest), 2)


def test_the_first_generation_is_above_those_of_the_checkpoints() -> None:
    machine = with_folder()
    effects = machine.take(Viewed(seen(machine, US), True))
    assert (asked(effects), numbers(effects)) == ([True], [])
    assert asked(machine.take(Tick())) == [], "the look is under way"
    assert numbers(machine.take(NewestSaved(7, remote=True))) == [8]


def test_the_first_generation_is_above_those_of_the_checkpoints_that_only_other_nodes_have() -> None:
    """Else what the job does from then on would be older than the checkpoint of generation 10 that it began from."""
    machine = with_folder(shared=False)
    machine.take(Viewed(seen(machine, US, saved_on("m", 10)), True))
    assert numbers(machine.take(NewestSaved(3, remote=True))) == [11]


def test_a_look_whose_answer_is_lost_is_repeated() -> None:
    machine = with_folder()
    machine.take(Viewed(seen(machine, US), True))
    assert asked(machine.wait(ASK_AGAIN_S)) == [True]


def test_an_answer_that_comes_when_no_generation_is_due_is_not_kept() -> None:
    """Later there may be newer checkpoints."""
    machine = with_folder()
    machine.take(Viewed(seen(machine, US), True))
    machine.take(Viewed(seen(machine, US), False))
    assert numbers(machine.take(NewestSaved(7, remote=True))) == []
    effects = machine.wait(ASK_AGAIN_S, Viewed(seen(machine, US), True))
    assert (asked(effects), numbers(effects)) == ([True], [])


def test_a_checkpoint_folder_that_cannot_be_read_is_said_and_looked_at_again() -> None:
    machine = with_folder()
    machine.take(Viewed(seen(machine, US), True))
    effects = machine.take(NewestSaved(0, remote=True, error="Not a directory"))
    [state] = [effect.state for effect in effects if isinstance(effect, PutState)]
    assert state.reason == "checkpoint.dir cannot be read: Not a directory"
    assert (asked(effects), numbers(effects)) == ([], [])
    assert asked(machine.wait(ASK_AGAIN_S)) == [True]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("case", ["known", "written back", "after a loss", "set back"])
def test_numbers_continue_from_the_checkpoints_if_etcd_may_have_an_old_one(case: str, shared: bool) -> None:
    """An agent that was away has written back what it knew; or etcd was set back to a backup while no agent ran. A
    folder that one node alone sees does not count as long as a node goes on: it may be an earlier job's of the same
    name, on a node that came late. In generation 31 the live state of generation 1 would be older than its checkpoint,
    and the job would go on from that. While a node goes on and etcd has lost nothing, the folder is not read: it may be
    slow or gone."""
    machine, late = with_folder(shared=shared), saved_on("late", 0 if shared else 30)
    formed = generation(1, [place("gone" if case == "set back" else "a", 0)])
    machine.take(Viewed(seen(machine, US, late, generation=formed, generation_revision=5), True))
    if case == "after a loss":
        machine.take(Viewed(JobView(revision=1), True))
        machine.wait(machine.agent.policy.timeouts.lease_ttl_s)
    failed = seen(
        machine, US, late, generation=formed, generation_revision=5, revision=20,
        broken=broken(1, formed.nodes[0].node, 0), written_back=case == "written back",
    )  # fmt: skip
    effects = machine.take(Viewed(failed, True))
    if case == "set back":
        times = machine.agent.policy.timeouts
        effects += machine.wait(times.lease_ttl_s + times.form_s)
    if case == "known" or (not shared and case != "set back"):
        assert (asked(effects), numbers(effects)) == ([], [2])
        return
    assert (asked(effects)[0], numbers(effects)) == (case == "set back", [])
    assert numbers(machine.take(NewestSaved(10, remote=case == "set back"))) == [11 if shared else 31]
