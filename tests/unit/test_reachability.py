"""Which nodes are left out when they reach etcd and not each other: all agree, as few as possible, never all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import pytest

from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import BrokenRecord, GenerationNode, GenerationRecord, MemberRecord
from elastic.contract.records.reasons import Code, listed, reason
from elastic.recovery.facts import reachability
from elastic.recovery.facts.membership import (
    Change,
    NodeLimits,
    Situation,
    Wait,
    cut_off,
    leader,
    next_generation,
    watch_list,
)
from elastic.recovery.facts.view import JobView

LIMITS = NodeLimits(min_nodes=1, max_nodes=8, join_wait_s=0.0)
NOBODY = frozenset[tuple[str, str]]()


def member(node: str, create_revision: int, unreachable: tuple[str, ...] = (), draining: str | None = None) -> Member:
    record = MemberRecord(
        node=node, incarnation=f"{node}-1", host="h", port=1, slots=1, ready=(0,), unreachable=unreachable,
        draining=draining,
    )  # fmt: skip
    return Member(record, create_revision)


def generation(seated: str, host: str | None = None) -> GenerationRecord:
    places = tuple(GenerationNode(node=n, incarnation=f"{n}-1", host="h", slots=(0,), port=1) for n in seated)
    return GenerationRecord(number=1, nodes=places, store_host="h", store_port=1, leader=host or seated[0], why="")


def job_view(
    nodes: str,
    seated: str,
    *complaints: str,
    broken: BrokenRecord | None = None,
    host: str | None = None,
) -> JobView:
    """Members from the oldest on; 'ab': a complains of b."""
    said: dict[str, list[str]] = {}
    for pair in complaints:
        said.setdefault(pair[0], []).append(pair[1])
    members = {n: member(n, i, tuple(sorted(said.get(n, ())))) for i, n in enumerate(nodes)}
    current = generation(seated, host) if seated else None
    return JobView(members=members, generation=current, generation_revision=50, broken=broken)


def cut(view: JobView, dead: frozenset[tuple[str, str]] = NOBODY) -> str:
    return "".join(sorted(cut_off(view, dead, view.generation)))


def decide(view: JobView, *, steps_advance: bool, settled: bool = True, limits: NodeLimits = LIMITS) -> Change | Wait:
    return next_generation(
        Situation(
            view, view.generation, limits, NOBODY, steps_advance=steps_advance, settled=settled, min_reached_for_s=9.0
        )
    )


def nodes_of(verdict: Change | Wait) -> str:
    assert isinstance(verdict, Change), verdict
    return "".join(place.node for place in verdict.nodes)


# ── nodes left out ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("nodes", "seated", "complaints", "out"),
    [
        ("abc", "abc", ["ca", "cb"], "c"),  # it says so itself
        ("abc", "abc", ["ac", "bc"], "c"),  # the others do
        ("abc", "abc", ["ab", "ca"], "a"),  # each says what it sees of the leader
        ("ab", "ab", ["ab"], "b"),  # two: the younger
        ("ab", "ab", ["ba"], "b"),
        ("abcd", "abcd", ["ac", "ad", "bc", "bd"], "cd"),  # half from half
        ("ab", "b", ["ab"], "a"),  # the one outside the generation, though it is older
        ("abcde", "ab", ["ac", "ad", "ae", "bc", "bd", "be"], "cde"),  # the state is where the seats are
        ("abc", "ab", ["ab", "bc"], "b"),  # no innocent outsider
        ("abc", "", ["ca", "cb"], "c"),  # nothing formed yet
        ("ab", "ab", ["ax"], ""),  # of an absent node
    ],
)
def test_reachability_cut_leaves_out_the_expected_nodes(
    nodes: str, seated: str, complaints: list[str], out: str
) -> None:
    assert cut(job_view(nodes, seated, *complaints)) == out


def test_reachability_cut_prefers_a_draining_node() -> None:
    view = JobView(
        members={"a": member("a", 1, draining="maintenance"), "b": member("b", 2, ("a",))}, generation=generation("ab")
    )
    assert cut(view) == "a"


def test_reachability_cut_prefers_a_node_that_lost_the_state() -> None:
    lost = BrokenRecord(generation=1, node="a", kind="exit", detail="", slots=(0,))
    assert cut(job_view("ab", "ab", "ab", broken=lost)) == "a"


def test_the_dead_neither_complain_nor_are_complained_of() -> None:
    view = job_view("abc", "abc", "ca", "cb")
    assert cut(view, frozenset({("c", "c-1")})) == ""


def random_case(rng: random.Random) -> tuple[frozenset[reachability.Dispute], tuple[str, ...], frozenset[str]]:
    nodes = [f"n{i}" for i in range(rng.randint(2, 9))]
    pairs = list(itertools.combinations(nodes, 2))
    found = reachability.disputes(_said(rng, nodes, rng.sample(pairs, rng.randint(1, len(pairs)))))
    inside = sorted({n for pair in found for n in pair})
    rng.shuffle(inside)
    return found, tuple(inside), frozenset(rng.sample(inside, rng.randint(0, len(inside))))


def _said(rng: random.Random, nodes: list[str], pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    said: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in pairs:
        said[a].append(b)
        if rng.random() < 0.5:
            said[b].append(a)
    return said


@pytest.mark.parametrize("seed", range(300))
def test_reachability_cut_invariants_hold_on_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    found, order, seated = random_case(rng)
    out = reachability.left_out(found, order, seated)
    assert all(a in out or b in out for a, b in found), "two nodes that cannot reach each other stay"
    assert set(order) - out, "everybody is left out"
    assert not seated or seated - out, "all nodes with the state are left out"
    inner = {pair for pair in found if seated.issuperset(pair)}
    assert inner or not out & seated, "a node left the generation because of an outsider"
    for node in out:  # nobody without need
        back = out - {node}
        clash = [pair for pair in found if node in pair and not back & set(pair)]
        assert clash, f"{node} is left out for nothing"


@pytest.mark.parametrize("seed", range(50))
def test_reachability_cut_is_independent_of_reporter_and_order(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [f"n{i}" for i in range(6)]
    pairs = rng.sample(list(itertools.combinations(nodes, 2)), 5)
    views = []
    for _ in range(4):
        said = _said(rng, nodes, [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs])
        shuffled = rng.sample(nodes, len(nodes))
        members = {n: member(n, nodes.index(n), tuple(said[n])) for n in shuffled}
        places = tuple(GenerationNode(node=n, incarnation=f"{n}-1", host="h", slots=(0,), port=1) for n in nodes[:4])
        current = GenerationRecord(number=1, nodes=places, store_host="h", store_port=1, leader="n0", why="")
        views.append(JobView(members=members, generation=current))
    assert len({cut_off(view, NOBODY, view.generation) for view in views}) == 1


@pytest.mark.parametrize("node", "abcdef")
def test_reachability_cut_of_a_star_leaves_out_only_its_center(node: str) -> None:
    others = "abcdef".replace(node, "")
    assert cut(job_view("abcdef", "abcd", *(node + o for o in others))) == node
    assert cut(job_view("abcdef", "abcd", *(o + node for o in others))) == node


# ── what follows ──────────────────────────────────────────────────────────────────────────────────────────────


def test_unreachable_node_is_not_leader() -> None:
    view = job_view("abc", "abc", "ab", "ac")
    assert leader(view, NOBODY, view.generation) == "b"
    assert leader(job_view("ab", "", "ab"), NOBODY, None) == "a"


def test_unreachable_node_keeps_its_place_while_steps_advance() -> None:
    verdict = decide(job_view("abc", "abc", "ac", "bc"), steps_advance=True)
    assert verdict == Wait(reason(Code.UNREACHED, node="c", others="a, b"))


def test_once_steps_stop_the_others_go_on() -> None:
    verdict = decide(job_view("abc", "abc", "ac", "bc"), steps_advance=False)
    assert nodes_of(verdict) == "ab"
    assert isinstance(verdict, Change)
    assert not verdict.planned
    assert verdict.why == reason(Code.UNREACHED, node="c", others="a, b")


def test_a_broken_generation_is_repaired_without_it() -> None:
    broken = BrokenRecord(generation=1, node="b", kind="exit", detail="killed", slots=(0,))
    verdict = decide(job_view("abc", "abc", "ac", "bc", broken=broken), steps_advance=True)
    assert nodes_of(verdict) == "ab"


def test_unreachable_state_holder_does_not_keep_the_others_from_forming() -> None:
    """b alone holds the state, and cannot hand it over: what is at rest must do."""
    lost = BrokenRecord(generation=1, node="a", kind="exit", detail="killed", slots=(0,))
    assert nodes_of(decide(job_view("abs", "ab", "ab", "sb", broken=lost), steps_advance=False)) == "as"


def test_a_spare_takes_its_place() -> None:
    assert nodes_of(decide(job_view("abcd", "abc", "ac", "bc", "dc"), steps_advance=False)) == "abd"


PAIR = reason(Code.UNREACHED_PAIR, node="b", other="a")


def test_reachability_cut_below_min_nodes_waits_and_names_the_node() -> None:
    limits = NodeLimits(2, 2, 0.0)
    verdict = decide(job_view("ab", "ab", "ba"), steps_advance=False, limits=limits)
    assert verdict == Wait(listed(PAIR, reason(Code.TOO_FEW, count=1, least=2)), below_min=True)


def test_a_newcomer_that_cannot_be_reached_is_not_taken_in() -> None:
    assert decide(job_view("abc", "ab", "ac"), steps_advance=True) == Wait(
        reason(Code.UNREACHED_PAIR, node="c", other="a")
    )
    assert nodes_of(decide(job_view("abcd", "ab", "ac"), steps_advance=True)) == "abd"


def test_node_is_readmitted_once_no_peer_reports_it_unreachable() -> None:
    verdict = decide(job_view("abc", "ab"), steps_advance=True)
    assert nodes_of(verdict) == "abc"
    assert isinstance(verdict, Change)
    assert verdict.planned


def test_the_first_forming_goes_without_it() -> None:
    assert nodes_of(decide(job_view("abc", "", "ac", "bc"), steps_advance=False)) == "ab"
    verdict = decide(job_view("ab", "", "ab"), steps_advance=False, limits=NodeLimits(2, 2, 0.0))
    assert verdict == Wait(listed(reason(Code.TOO_FEW, count=1, least=2), PAIR), below_min=True)


def test_a_store_out_of_reach_cannot_be_formed_at() -> None:
    """The host of the generation's store has no place in it itself (it was leaving, or had no worker ready)."""
    lost = job_view("abc", "ab", "ac", "bc", host="c")
    assert nodes_of(decide(lost, steps_advance=False, settled=False)) == "ab"
    assert isinstance(decide(lost, steps_advance=False, settled=True), Wait)


# ── which peers a node watches ────────────────────────────────────────────────────────────────────────────────


def big(count: int) -> JobView:
    nodes = [f"n{i:04}" for i in range(count)]
    places = tuple(GenerationNode(node=n, incarnation=f"{n}-1", host="h", slots=(0,), port=1) for n in nodes[:-1])
    current = GenerationRecord(number=1, nodes=places, store_host="h", store_port=1, leader="n0000", why="")
    return JobView(members={n: member(n, i) for i, n in enumerate(nodes)}, generation=current)


def watched(view: JobView, me: str, complaints: Collection[str] = ()) -> set[str]:
    return {m.record.node for m in watch_list(view, NOBODY, view.generation, me, complaints)}


def test_in_a_small_job_all_look_at_all() -> None:
    view = job_view("abcd", "abc")
    assert all(watched(view, me) == set("abcd") - {me} for me in "abcd")


def test_in_a_large_job_lines_are_few_and_mutual() -> None:
    view = big(1000)
    lines = {me: watched(view, me) for me in view.members}
    assert lines["n0000"] == set(view.members) - {"n0000"}
    assert max(len(found) for me, found in lines.items() if me != "n0000") <= 21
    assert lines["n0999"] == {"n0000"}  # outside of the generation
    assert all(me in lines[other] for me, found in lines.items() for other in found)
    assert all({f"n{(i - 1) % 999:04}", f"n{(i + 1) % 999:04}"} <= lines[f"n{i:04}"] for i in range(999))


def test_node_reported_unreachable_stays_watched() -> None:
    assert {"n0099", "n0042"} <= watched(big(100), "n0005", ("n0099", "n0042"))
    assert watched(big(100), "n0005", ("n0099", "n0042")) > watched(big(100), "n0005")
