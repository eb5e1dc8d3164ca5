"""Which rank the state comes from: every small case, not a sample of them."""

from __future__ import annotations

import itertools

import pytest

from elastic.worker.state.state_source import NoStateError, Offer, StateLostError, choose, counted_before

FRESH = Offer(rank=0, version=(0, 0), clean=True, established=False)


def offer(rank: int, version: tuple[int, int] = (0, 0), **fields: object) -> Offer:
    return Offer(rank=rank, version=version, **{"clean": True, "established": version != (0, 0), **fields})  # type: ignore[arg-type]


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
    with pytest.raises(StateLostError, match="not trusted"):
        choose([offer(0, (3, 40))], "snapshot")
    with pytest.raises(NoStateError, match="not trusted") as caught:
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
