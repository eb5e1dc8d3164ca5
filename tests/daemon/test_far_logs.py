"""Lines of a rank on another node: all of them, once, wherever the rank goes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.contract.records.job_records import Phase
from elasticd.agents.logs import FAR_BYTES, Tail
from elasticd.api.request import Captured, flag
from elasticd.api.routes import log_routes
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.node.asks import MAX_BYTES, User

ADA = User(name="ada", uid=1000, admin=True)


class Generation:
    def __init__(self, **ranks: int) -> None:
        self._ranks = ranks
        self.nodes = [SimpleNamespace(node=node) for node in ranks]
        self.world_size = len(ranks)

    def ranks(self, node: str) -> dict[int, int]:
        return {0: self._ranks[node]} if node in self._ranks else {}


class Board:
    """Each `wait` goes on to the next of `steps`: a generation, or None once the job is over."""

    def __init__(self, *steps: Generation | None) -> None:
        self._steps = list(steps)
        self._generation = steps[0]
        self._go_on()

    def _go_on(self) -> None:
        over = False
        if self._steps:
            step = self._steps.pop(0)
            over, self._generation = step is None, step or self._generation
        else:
            over = True
        state = SimpleNamespace(phase=Phase.SUCCEEDED if over else Phase.RUNNING)
        job = SimpleNamespace(spec=None, generation=self._generation, over=over, state=state, members={})
        self.now = SimpleNamespace(cluster=SimpleNamespace(jobs={"j": job}, nodes={}), agents={})

    def wait(self, until: object, timeout_s: float) -> Any:
        self._go_on()
        return self.now


def service(published: Board, node: str, folder: Path, asker: Any = None) -> Any:
    return SimpleNamespace(
        published=published,
        identity=SimpleNamespace(node=node),
        asker=asker,
        logs=lambda job: Folder(folder),
        authority=SimpleNamespace(daemon_uid=0, is_admin=lambda peer: True, check_logs=lambda *_: None),
    )


class Asker:
    """The other nodes: they answer as their daemons do. `before` is called with the number of the question."""

    def __init__(self, nodes: Mapping[str, Any], before: Any = lambda number: None) -> None:
        self._nodes, self._before = nodes, before
        self.asked: list[str] = []

    def ask(self, node: str, path: str, query: Mapping[str, object], by: User) -> dict[str, Any]:
        self._before(len(self.asked))
        self.asked.append(node)
        h = Captured(self._nodes[node], by)
        log_routes.get_logs(h, {**{k: str(v) for k, v in query.items()}, "follow": "0", "here": "1"}, "j")
        found: dict[str, Any] = json.loads(json.dumps(h.content))
        return found


class Reader(Captured):
    def still_there(self) -> bool:
        assert len(self._lines) < 100_000, "the stream does not end"
        return True


def followed(published: Board, nodes: Mapping[str, Path], before: Any = lambda number: None) -> tuple[list[str], Asker]:
    """Lines, and notes as '# …', of rank 0 as node x shows them."""
    asker = Asker({node: service(published, node, folder) for node, folder in nodes.items()}, before)
    h = Reader(service(published, "x", Path("/nonexistent"), asker), ADA)
    log_routes.get_logs(h, {"rank": "0", "follow": "1"}, "j")
    lines = h.content["lines"]
    assert lines[-1]["end"]
    return [m["line"] if "line" in m else f"# {m['note']}" for m in lines[:-1]], asker


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "slot0.i.1.log"


def test_all_that_was_written_before_the_end_is_shown(tmp_path: Path, log: Path) -> None:
    wanted = [f"line {number} {'x' * 100}" for number in range(5000)]

    def before(number: int) -> None:
        if number == 1:
            log.write_text("\n".join(wanted))  # the last one without an end; more than one answer holds

    log.write_text("")
    found, asker = followed(Board(Generation(a=0), Generation(a=0), None), {"a": tmp_path}, before)
    assert found == wanted
    assert len(asker.asked) < 30


def test_a_rank_that_moves_is_followed_and_nothing_comes_twice(tmp_path: Path) -> None:
    for node in "ab":
        (tmp_path / node).mkdir()
        (tmp_path / node / "slot0.i.1.log").write_text(f"on {node}\n")
    on_b = Generation(b=0)
    published = Board(Generation(a=0), Generation(a=0), on_b, on_b, on_b, None)
    found, asker = followed(published, {node: tmp_path / node for node in "ab"})
    assert found == ["on a", "# rank 0 is on b now", "on b"]
    assert asker.asked[-1] == "b"


def test_a_node_answers_for_itself_only(tmp_path: Path) -> None:
    asker = Asker({})
    h = Captured(service(Board(Generation(b=0)), "a", tmp_path, asker), ADA)
    with pytest.raises(Refused, match="rank 0 of job 'j' is not on node a"):
        log_routes.get_logs(h, {"rank": "0", "here": "1"}, "j")
    assert not asker.asked


def test_a_rank_that_has_come_to_this_node_ends_the_stream_with_a_word(tmp_path: Path, log: Path) -> None:
    log.write_text("on a\n")
    found, _ = followed(Board(Generation(a=0), Generation(x=0), Generation(x=0)), {"a": tmp_path})
    assert found[0] == "on a"
    assert "ask again" in found[1]


def test_a_line_that_never_ends_is_passed_on_in_pieces(tmp_path: Path, log: Path) -> None:
    log.write_bytes(b"\r 10%" * FAR_BYTES)
    offsets: dict[str, int] = {log.name: 0}
    read = []
    while True:
        tail = Tail(Folder(tmp_path))
        lines = tail.more_from(offsets)
        if tail.offsets == offsets:
            break
        offsets = tail.offsets
        read += [line.text for line in lines]
        assert len(read) < 100
    assert len("".join(read)) >= 4 * FAR_BYTES - 4


def test_lines_left_out_are_said(tmp_path: Path) -> None:
    h = Captured(service(Board(Generation(a=0)), "a", tmp_path), ADA)
    h.begin_stream()
    for number in range(40):
        h.stream({"line": "x" * (MAX_BYTES // 40), "number": number})
    h.end_stream()
    first, *lines = h.content["lines"]
    assert first["cut"]
    assert first["note"].startswith(f"{40 - len(lines)} earlier lines are left out")
    assert lines[-1]["number"] == 39


@pytest.mark.parametrize(("given", "is_on"), [({}, False), ({"f": "0"}, False), ({"f": "1"}, True), ({"f": ""}, True)])
def test_a_flag_of_a_query(given: dict[str, str], is_on: bool) -> None:
    assert flag(given, "f") is is_on


def test_a_flag_that_is_neither_is_refused() -> None:
    with pytest.raises(Refused, match=r"^follow = 'yes': 1 or 0$"):
        flag({"follow": "yes"}, "follow")
