"""An order to stop at a step that comes after this rank has passed the step."""

from __future__ import annotations

import mmap
import socket
import time
from collections.abc import Iterator

import pytest

from elastic.contract.worker import messages
from elastic.contract.worker.beat import PAGE_BYTES, PULSE_S
from elastic.worker.link.agent_link import AgentLink
from elastic.worker.link.session import LATE_S, GenerationEnded, Session

GENERATION = 3


class Group:
    """As the session sees it."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self, why: str) -> None:
        self.aborted = True


@pytest.fixture
def told_late() -> Iterator[tuple[Session, Group]]:
    """A worker at step 11 that is told to stop after step 9."""
    agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session, group = Session(channel, memoryview(mmap.mmap(-1, PAGE_BYTES))), Group()
    session.holds(group, GENERATION)
    for step in (10, 11):
        session.check(GENERATION, step)
    session._take(messages.StopAtStep(generation=GENERATION, at_step=9, why="a node leaves"), [])
    yield session, group
    agent.close()
    channel.close()


def test_the_step_under_way_is_committed_if_all_ranks_take_part(told_late: tuple[Session, Group]) -> None:
    """Aborted within it, a rank that leaves the job could be the only one that has committed it."""
    session, group = told_late
    assert not group.aborted
    assert not session.over(GENERATION)  # so the optimizer may apply its gradients
    with pytest.raises(GenerationEnded, match="planned change after step 12"):
        session.check(GENERATION, 12)


def test_what_torch_raises_because_another_rank_has_stopped_is_no_bug(told_late: tuple[Session, Group]) -> None:
    session, _ = told_late
    assert session.ends(GENERATION)
    assert not session.ends(GENERATION + 1)


def test_the_group_is_aborted_where_a_rank_has_stopped_before(told_late: tuple[Session, Group]) -> None:
    """This one waits for it in a collective that never ends."""
    session, group = told_late
    assert 0.0 < session._patience_s(time.monotonic() - LATE_S) <= PULSE_S
    assert not group.aborted
    session._patience_s(time.monotonic() + 3600.0)  # as the monitor asks
    assert group.aborted
    assert session.over(GENERATION)


def test_a_group_that_was_formed_since_is_not_aborted(told_late: tuple[Session, Group]) -> None:
    session, _ = told_late
    following = Group()
    session.holds(following, GENERATION + 1)
    session._patience_s(time.monotonic() + 3600.0)
    assert not following.aborted


def test_a_long_step_has_its_time(told_late: tuple[Session, Group]) -> None:
    """As the last one took: steps of more than half a second are not aborted half-way."""
    session, group = told_late
    link = AgentLink(session, backward_waits=True)
    link.enter(GENERATION + 1, 20)
    session.holds(group, GENERATION + 1)
    link.committed(21, 4.0, None)
    link.check(21)
    session._take(messages.StopAtStep(generation=GENERATION + 1, at_step=20, why="a node leaves"), [])
    now_s = time.monotonic()
    session._patience_s(now_s + 5.0)
    assert not group.aborted
    session._patience_s(now_s + 6.1)
    assert group.aborted


def test_an_order_in_time_ends_the_patience_of_one_before_it(told_late: tuple[Session, Group]) -> None:
    """All ranks are to stop after a step that is still ahead of them: none waits in vain."""
    session, _ = told_late
    following = Group()
    session.holds(following, GENERATION + 1)
    session._take(messages.StopAtStep(generation=GENERATION + 1, at_step=14, why="another one"), [])
    session._patience_s(time.monotonic() + 3600.0)
    assert not following.aborted
