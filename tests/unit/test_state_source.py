"""Which rank the state comes from: every small case, not a sample of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.worker.state import state_source
from elastic.worker.state.state_source import Choice, NoStateError, Offer, StateLostError, Version, counted_before

FRESH = Offer(rank=0, version=(0, 0), clean=True, established=False)


def offer(rank: int, version: tuple[int, int] = (0, 0), **fields: object) -> Offer:
    return Offer(rank=rank, version=version, **{"clean": True, "established": version != (0, 0), **fields})  # type: ignore[arg-type]


def choose(offers: Sequence[Offer], restore: str = "newest", before: int = 0) -> Choice:
    """Of replicated state: there is one key."""
    (choice,) = state_source.choose(offers, restore, before).values()
    return choice


def test_survivors_keep_theirs_and_the_newcomer_receives_from_the_lowest() -> None:
    choice = choose([offer(0, (3, 40)), offer(1, (3, 40)), offer(2)])
    assert (choice.origin, choice.source, choice.version, choice.needs) == ("live", 0, (3, 40), (2,))


def test_state_source_is_the_rank_one_step_ahead() -> None:
    choice = choose([offer(0, (3, 40)), offer(1, (3, 41)), offer(2, (3, 40))])
    assert (choice.source, choice.version, choice.needs) == (1, (3, 41), (0, 2))


def test_half_a_step_is_no_source() -> None:
    choice = choose([offer(0, (3, 41), clean=False), offer(1, (3, 40))])
    assert (choice.source, choice.needs) == (1, (0,))


def test_a_later_generation_beats_more_steps_of_a_node_that_was_cut_off() -> None:
    choice = choose([offer(0, (2, 90)), offer(1, (3, 41))])
    assert (choice.source, choice.version) == (1, (3, 41))


def test_equal_steps_of_different_lineages_are_not_the_same_state() -> None:
    """Each of two worlds that were cut off from one another has committed a step 41 of its own."""
    choice = choose([offer(0, (2, 41)), offer(1, (3, 41)), offer(2, (2, 41))])
    assert (choice.source, choice.version, choice.needs) == (1, (3, 41), (0, 2))


def test_a_set_up_that_was_handed_out_is_live_state() -> None:
    choice = choose([offer(0), offer(1, (2, 0), established=True)])
    assert (choice.origin, choice.source, choice.needs) == ("live", 1, (0,))


def test_nothing_anywhere_takes_the_first_whole_set_up_to_all_others() -> None:
    choice = choose([offer(0, clean=False), offer(1), offer(2)])
    assert (choice.origin, choice.source, choice.needs) == ("setup", 1, (0, 2))


def test_state_source_refuses_a_fresh_start_if_a_checkpoint_is_known() -> None:
    offers = [offer(0), offer(1, known_step=40), offer(2, known_step=20)]
    with pytest.raises(NoStateError, match=r"a checkpoint of step 40.*submit the job again"):
        choose(offers)
    assert choose([*offers, offer(3, checkpoint=(1, 20))]).origin == "checkpoint"
    assert choose([*offers, offer(3, (1, 41))]).origin == "live"


def test_a_checkpoint_newer_than_the_live_state_of_a_straggler_wins() -> None:
    choice = choose([offer(0, (3, 40)), offer(1, checkpoint=(5, 60))])
    assert (choice.origin, choice.source, choice.version, choice.needs) == ("checkpoint", 1, (5, 60), (0,))


@pytest.mark.parametrize(
    ("live", "saved", "origin"),
    [
        ((7, 1000), (30, 60), "live"),  # of an earlier job, in the folder of a node that came late
        ((7, 1000), (9, 60), "live"),
        ((7, 1000), (8, 1001), "checkpoint"),
        ((5, 100), (7, 200), "checkpoint"),  # a node that was cut off while the others trained on
        (None, (30, 60), "checkpoint"),
    ],
)
def test_a_checkpoint_of_no_earlier_generation_does_not_displace_live_state(
    live: tuple[int, int] | None, saved: tuple[int, int], origin: str
) -> None:
    """Generation 9 forms: 8 has broken before its first step, or there was none."""
    for kept in ({"checkpoint": saved}, {"snapshot": saved}):
        offers = [offer(0, live or (0, 0)), offer(1, **kept)]
        choice = choose(offers, "newest", counted_before(offers, "newest", 9))
        assert choice.origin == (origin if origin == "live" else next(iter(kept)))
        assert choose(offers, "snapshot", counted_before(offers, "snapshot", 9)).version == saved


def test_among_equals_live_beats_snapshot_beats_checkpoint() -> None:
    everything = [offer(0, checkpoint=(3, 40)), offer(1, snapshot=(3, 40)), offer(2, (3, 40))]
    assert [choose(everything[:n]).origin for n in (1, 2, 3)] == ["checkpoint", "snapshot", "live"]


def test_state_source_in_a_rollback_ignores_live_state_and_all_others_receive() -> None:
    offers = [offer(0, (3, 44), checkpoint=(3, 20)), offer(1, (3, 44), snapshot=(3, 40))]
    choice = choose(offers, "snapshot")
    assert (choice.origin, choice.source, choice.version, choice.needs) == ("snapshot", 1, (3, 40), (0,))


@pytest.mark.parametrize("restore", ["newest", "snapshot"])
def test_never_a_silent_start_from_zero(restore: str) -> None:
    """All that is left of a job that had state is half-changed: that is an error, and no reason to begin anew."""
    with pytest.raises(NoStateError, match="rank 0: live state half-changed"):
        choose([offer(0, (3, 40), clean=False), offer(1)], restore)


def test_a_rollback_of_a_job_that_has_never_saved_begins_again_in_the_same_processes() -> None:
    """They know the step whose loss was not finite, and look for its layer; new ones would not."""
    with pytest.raises(StateLostError, match=r"restore = 'snapshot'.*live state of step 40, no snapshot"):
        choose([offer(0, (3, 40))], "snapshot")
    with pytest.raises(NoStateError, match="live state of step 40") as caught:
        choose([offer(0, (3, 40), known_step=20)], "snapshot")
    assert not isinstance(caught.value, StateLostError)


def test_unknown_restore() -> None:
    with pytest.raises(ValueError, match="'newest' or 'snapshot'"):
        choose([FRESH], "oldest")


def test_the_rule_holds_in_every_small_world() -> None:
    """All combinations of 3 ranks with each of these; the choice is checked against the rule, said differently."""
    kept = [None, (1, 1), (2, 1)]
    kinds = [
        Offer(rank=0, version=version, clean=clean, established=version != (0, 0), snapshot=snapshot)
        for version in [(0, 0), (1, 1), (1, 2), (2, 1)]
        for clean in (True, False)
        for snapshot in kept
    ]
    for three in itertools.product(kinds, repeat=3):
        offers = [
            Offer(rank=r, version=o.version, clean=o.clean, established=o.established, snapshot=o.snapshot)
            for r, o in enumerate(three)
        ]
        live = {o.version for o in offers if o.clean and o.established}
        snapshots = {o.snapshot for o in offers if o.snapshot}
        try:
            choice = choose(offers)
        except NoStateError:
            assert not live
            assert not snapshots
            assert any(o.established for o in offers) or not any(o.clean for o in offers)
            continue
        if not live | snapshots:
            assert choice.origin == "setup"
            assert len(choice.needs) == 2
            continue
        newest = max(live | snapshots)
        assert choice.version == newest
        assert choice.origin == ("live" if newest in live else "snapshot")
        source = offers[choice.source]
        assert (source.version if choice.origin == "live" else source.snapshot) == newest
        if choice.origin == "live":
            assert source.clean
            assert choice.source == min(o.rank for o in offers if o.clean and o.established and o.version == newest)
            has = {o.rank for o in offers if o.clean and o.established and o.version == newest}
            assert set(choice.needs) == {0, 1, 2} - has
        else:
            assert set(choice.needs) == {0, 1, 2} - {choice.source}


# ── parts of the state: the newest version that every key can be had at ─────────────────────────────────────────


def test_a_part_that_only_a_snapshot_has_takes_all_back_to_it() -> None:
    """Rank 1 was killed: its part is in its node's memory, of the two steps that every rank has kept."""
    kept = {"snapshot": (1, 20), "older": (1, 10)}
    offers = [offer(0, (1, 27), key=7, **kept), offer(1, key=8, **kept), offer(2, (1, 27), key=9, **kept)]
    choices = state_source.choose(offers)
    assert {(c.version, c.origin) for c in choices.values()} == {((1, 20), "snapshot")}
    assert [(choices[key].source, choices[key].needs) for key in (7, 8, 9)] == [(0, ()), (1, ()), (2, ())]


def test_one_rank_that_lacks_the_newest_snapshot_takes_all_to_the_one_before_it() -> None:
    whole = {"snapshot": (1, 20), "older": (1, 10)}
    choices = state_source.choose(
        [offer(0, key=1, **whole), offer(1, key=2, snapshot=(1, 10)), offer(2, key=3, **whole)]
    )
    assert {c.version for c in choices.values()} == {(1, 10)}


def test_a_replica_gives_its_part_and_nobody_goes_back() -> None:
    offers = [offer(rank, (1, 27), key=rank % 2 + 1, snapshot=(1, 20)) for rank in range(3)] + [offer(3, key=2)]
    choices = state_source.choose(offers)
    assert {(c.version, c.origin) for c in choices.values()} == {((1, 27), "live")}
    assert (choices[2].source, choices[2].needs, choices[1].needs) == (1, (3,), ())


def test_a_torn_step_is_gone_back_from() -> None:
    """One part stands at 27 on all that have it, the other at 26: no replica helps."""
    offers = [offer(rank, (1, 26 + rank % 2), key=rank % 2 + 1, snapshot=(1, 20)) for rank in range(4)]
    assert {c.version for c in state_source.choose(offers).values()} == {(1, 20)}
    assert not state_source.all_live(offers, 2)


def test_a_checkpoint_is_read_by_one_rank_of_each_part() -> None:
    offers = [offer(rank, key=rank % 2 + 1, checkpoint=(1, 20)) for rank in range(4)]
    choices = state_source.choose(offers)
    assert [(choices[key].origin, choices[key].source, choices[key].needs) for key in (1, 2)] == [
        ("checkpoint", 0, (2,)),
        ("checkpoint", 1, (3,)),
    ]


def test_a_part_whose_node_is_lost_comes_from_the_node_that_has_a_copy() -> None:
    kept = {"snapshot": (1, 20), "older": (1, 10), "checkpoint": (1, 5)}
    offers = [
        offer(0, (1, 27), key=1, others=((3, (1, 20)), (3, (1, 10))), **kept),
        offer(1, (1, 27), key=2, others=((4, (1, 10)),), **kept),
        offer(2, key=3, checkpoint=(1, 5)),
        offer(3, key=4, checkpoint=(1, 5)),
    ]
    choices = state_source.choose(offers)
    assert {(c.version, c.origin) for c in choices.values()} == {((1, 10), "snapshot")}
    assert [(choices[key].source, choices[key].needs) for key in (1, 2, 3, 4)] == [
        (0, ()),
        (1, ()),
        (0, (2,)),
        (1, (3,)),
    ]


def test_a_rank_that_can_load_its_part_itself_is_nearer_than_a_copy_elsewhere() -> None:
    offers = [offer(0, key=1, snapshot=(1, 20), others=((2, (1, 20)),)), offer(1, key=2, snapshot=(1, 20))]
    assert state_source.choose(offers)[2].source == 1


def test_a_part_without_any_version_is_lost_for_all() -> None:
    offers = [offer(0, (1, 27), key=1, snapshot=(1, 20)), offer(1, key=2)]
    with pytest.raises(StateLostError):
        state_source.choose(offers)
    with pytest.raises(NoStateError, match="checkpoint"):
        state_source.choose([*offers, offer(2, key=3, known_step=20)])


VERSIONS = st.sampled_from([(1, 10), (1, 11), (1, 20), (2, 11), (2, 12)])
PARTS = st.builds(
    lambda key, live, clean, saves, checkpoint, others: {
        "key": key,
        "version": live or (0, 0),
        "clean": clean,
        "established": live is not None,
        "snapshot": max(saves, default=None),
        "older": min(saves) if len(saves) == 2 else None,
        "checkpoint": checkpoint,
        "others": tuple((of, version) for of, version in others if of != key),
    },
    st.integers(1, 3),
    st.none() | VERSIONS,
    st.booleans(),
    st.sets(VERSIONS, max_size=2),
    st.none() | VERSIONS,
    st.lists(st.tuples(st.integers(1, 4), VERSIONS), max_size=2),
)


@settings(max_examples=2000, deadline=None, report_multiple_bugs=False)
@given(st.lists(PARTS, min_size=1, max_size=6))
def test_all_parts_are_of_one_version_and_no_newer_one_was_there(drawn: list[dict[str, Any]]) -> None:
    """Never torn, never from where it is not, never older than need be."""
    offers = [Offer(rank=rank, **each) for rank, each in enumerate(drawn)]
    had: dict[int, set[Version]] = {o.key: set() for o in offers}
    for o in offers:
        had[o.key] |= {v for v in (o.snapshot, o.older, o.checkpoint) if v is not None}
        had[o.key] |= {o.version} if o.clean and o.established else set()
    for of, version in (each for o in offers for each in o.others):
        had.get(of, set()).add(version)
    common = set.intersection(*had.values())
    try:
        choices = state_source.choose(offers)
    except NoStateError:
        assert not common
        return
    if not common:
        assert {c.origin for c in choices.values()} == {"setup"}
        return
    assert {c.version for c in choices.values()} == {max(common)}
    for key, choice in choices.items():
        source = offers[choice.source]
        others = {o.rank for o in offers if o.key == key} - {choice.source}
        if source.key != key:
            assert choice.origin == "snapshot"
            assert (key, choice.version) in source.others
            assert set(choice.needs) == others
            assert not any(choice.version in (offers[r].snapshot, offers[r].older) for r in others)
            continue
        held = {
            "live": [source.version],
            "snapshot": [source.snapshot, source.older],
            "checkpoint": [source.checkpoint],
        }
        assert choice.version in held[choice.origin]
        assert source.clean or choice.origin != "live"
        alike = {r for r in others if offers[r].clean and offers[r].established and offers[r].version == choice.version}
        assert set(choice.needs) == others - (alike if choice.origin == "live" else set())
