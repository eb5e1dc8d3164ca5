"""The files that `job.log` fills: each step once, whatever was lost, killed or repeated in between."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.wait import eventually

from elastic.agent.reports import metric_files
from elastic.agent.reports import metric_files as event_file
from elastic.agent.reports.metric_files import MetricFiles, MetricWriter, published
from elastic.contract.records.job_records import ProgressRecord, decode, encode
from elastic.contract.worker import messages
from elastic.contract.worker.messages import LoggedRow


def row(step: int, **values: float) -> LoggedRow:
    return LoggedRow(step=step, wall_s=float(step), values=values or {"loss": step / 10})


def lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    found = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [(each["step"], each["values"]) for each in found]


def steps(folder: Path) -> list[int]:
    return [step for step, _ in lines(folder)]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """A message in protocol buffers: field -> values."""
    found: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def shown(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows of the event files: (name, step) -> value. Raises AssertionError for a value twice."""
    kept: dict[tuple[str, int], float] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            (crc,) = struct.unpack_from("<I", data, at + 8)
            assert crc == event_file.masked_crc(data[at : at + 8])
            content = data[at + 12 : at + 12 + size]
            (crc,) = struct.unpack_from("<I", data, at + 12 + size)
            assert crc == event_file.masked_crc(content)
            at += 16 + size
            event = fields(content)
            (step,) = event[2]
            assert isinstance(step, int)
            if 7 in event:
                kept = {key: value for key, value in kept.items() if key[1] < step}
            for summary in event.get(5, []):
                assert isinstance(summary, bytes)
                for raw in fields(summary)[1]:
                    assert isinstance(raw, bytes)
                    value = fields(raw)
                    tag, number = value[1][0], value[2][0]
                    assert isinstance(tag, bytes)
                    assert isinstance(number, bytes)
                    assert (tag.decode(), step) not in kept, f"{tag!r} twice at step {step}"
                    kept[tag.decode(), step] = struct.unpack("<f", number)[0]
    return kept


def test_masked_checksum_is_that_of_the_format() -> None:
    # CRC-32C of "123456789" is 0xE3069283; masked as in the format of the records.
    assert event_file.masked_crc(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_steps_that_were_lost_are_cut_off_and_written_again_once(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    for step in (1, 2, 3, 4):
        files.take(1, 0, row(step), repeated=False)
    files.take(2, 2, row(3, loss=9.0), repeated=False)
    files.close()
    assert lines(tmp_path) == [(1, {"loss": 0.1}), (2, {"loss": 0.2}), (3, {"loss": 9.0})]
    assert shown(tmp_path) == {("loss", 1): pytest.approx(0.1), ("loss", 2): pytest.approx(0.2), ("loss", 3): 9.0}


def test_the_next_rank_0_fills_the_gap_of_its_predecessor_and_nothing_twice(tmp_path: Path) -> None:
    first = MetricFiles(tmp_path)
    for step in (1, 2, 3):
        first.take(1, 0, row(step), repeated=False)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,"wall')  # its node died here
    second = MetricFiles(tmp_path)
    for step in (2, 3, 4, 5):
        second.take(2, 5, row(step, loss=step / 10, other=1.0), repeated=True)
    second.take(2, 5, row(6), repeated=False)
    second.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[1] == (2, {"loss": 0.2}), "what the first rank 0 wrote stays"
    assert {step for _, step in shown(tmp_path)} == {1, 2, 3, 4, 5, 6}


def test_a_damaged_line_costs_none_of_the_lines_after_it(tmp_path: Path) -> None:
    first = MetricFiles(tmp_path)
    for step in range(1, 7):
        first.take(1, 0, row(step, a=step), repeated=False)
    first.close()
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    whole[2] = b"\0" * (len(whole[2]) - 1) + b"\n"
    file.write_bytes(b"".join(whole))
    then = MetricFiles(tmp_path)
    then.take(2, 6, row(7, a=7), repeated=False)
    assert file.read_bytes().startswith(b"".join(whole))
    assert then.last == 7
    then.take(3, 4, row(5, a=50), repeated=False)  # steps 5 to 7 were lost
    then.close()
    good = [json.loads(line) for line in file.read_bytes().splitlines() if not line.startswith(b"\0")]
    assert [(each["step"], each["values"]["a"]) for each in good] == [(1, 1), (2, 2), (4, 4), (5, 50)]


def test_agents_that_take_turns_write_each_step_once(tmp_path: Path) -> None:
    """Rank 0 is lost on one node, then on the other one: its first agent does not rely on what it knew."""
    one, other = MetricFiles(tmp_path), MetricFiles(tmp_path)
    for step in (1, 2, 3):
        one.take(1, 0, row(step), repeated=False)
    for step in (4, 5, 6):
        other.take(2, 3, row(step), repeated=False)
    for step in (2, 3, 4, 5, 6):
        one.take(3, 6, row(step), repeated=True)
    one.take(3, 6, row(7), repeated=False)
    one.close()
    other.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(step for _, step in shown(tmp_path)) == steps(tmp_path)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 3


def test_a_gap_before_known_steps_is_filled_in_order(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    for step in (1, 2, 5):
        files.take(1, 0, row(step), repeated=False)
    files.take(2, 5, row(3), repeated=True)
    files.close()
    assert steps(tmp_path) == [1, 2, 3, 5]
    assert {step for _, step in shown(tmp_path)} == {1, 2, 3, 5}


def test_rows_of_a_generation_that_is_over_are_not_written(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    files.take(3, 0, row(1), repeated=False)
    files.take(2, 0, row(2), repeated=False)
    files.close()
    assert steps(tmp_path) == [1]


def test_files_go_back_beyond_the_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "KEPT_ROWS", 5)
    files = MetricFiles(tmp_path)
    for step in range(1, 21):
        files.take(1, 0, row(step), repeated=False)
    files.take(2, 3, row(4), repeated=False)
    files.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


HISTORY = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.booleans(), st.integers(0, 3)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(HISTORY)
def test_after_any_failures_each_step_is_there_once(history: list[tuple[int, int, bool, int]]) -> None:
    """Of each generation: steps made, steps lost at its end, whether another agent writes the next one, and how many
    of its last rows its rank 0 did not pass on. The next rank 0 has kept all rows."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder, begun, kept = Path(name), 0, dict[int, LoggedRow]()
        files = MetricFiles(folder)
        for generation, (made, lost, moves, unsent) in enumerate([*history, (1, 0, False, 0)], 1):
            for old in [step for step in kept if step > begun]:
                del kept[old]
            for step in sorted(kept):
                files.take(generation, begun, kept[step], repeated=True)
            for step in range(begun + 1, begun + made + 1):
                kept[step] = row(step)
                if step <= begun + made - unsent:
                    files.take(generation, begun, kept[step], repeated=False)
            begun = max(0, begun + made - lost)
            if moves:
                files.close()
                files = MetricFiles(folder)
        files.close()
        assert steps(folder) == list(range(1, max(kept) + 1))
        assert sorted(step for _, step in shown(folder)) == steps(folder)


def test_a_folder_that_takes_no_writes_holds_up_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_files, "RETRY_S", 0.01)
    (tmp_path / "job").write_text("a file where the folder should be")
    writer = MetricWriter(tmp_path / "job")
    with capture_logs() as logged:
        writer.take(1, 0, [row(1)], repeated=False)
        assert writer.newest == {"loss": 0.1}
        eventually(lambda: "metrics.not_written" in [entry["event"] for entry in logged], 10.0, "it has tried")
    (tmp_path / "job").unlink()
    eventually(lambda: (tmp_path / "job" / "metrics.jsonl").exists(), 10.0, "it is written")
    writer.close()
    assert steps(tmp_path / "job") == [1]


def test_rows_wait_for_a_thread_that_cannot_be_started_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads the loop of the agent goes on."""
    writer = MetricWriter(tmp_path / "job")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as starved:
        starved.setattr(threading.Thread, "start", refuse)
        writer.take(1, 0, [row(1)], repeated=False)
    writer.take(1, 0, [row(2)], repeated=False)
    writer.close()
    assert steps(tmp_path / "job") == [1, 2]


def test_a_loss_that_is_not_finite_passes_the_message_and_the_file(tmp_path: Path) -> None:
    """JSON has no NaN: the agent ended at the message, and at its next start cut the file off at the line."""
    nan, inf = row(2, loss=float("nan"), lr=0.5).as_json(), row(3, loss=float("-inf")).as_json()
    sent = messages.Logged(generation=1, begun=0, rows=(row(1, loss=0.1), nan, inf))
    got = messages.from_worker(messages.encode(sent))
    assert isinstance(got, messages.Logged)
    for begun, rows in ((0, got.rows), (3, (row(4, loss=0.2),))):
        files = MetricFiles(tmp_path)
        for each in rows:
            files.take(1, begun, each.from_json(), repeated=False)
        files.close()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["values"], line.get("not_finite")) for line in found] == [
        (1, {"loss": 0.1}, None), (2, {"lr": 0.5}, {"loss": "nan"}), (3, {}, {"loss": "-inf"}),
        (4, {"loss": 0.2}, None),
    ]  # fmt: skip


def test_without_a_folder_the_newest_values_are_kept_and_no_thread_runs() -> None:
    writer = MetricWriter(None)
    writer.take(1, 0, [row(1, loss=0.1, lr=0.5), row(2, loss=float("nan"), up=float("inf"))], repeated=False)
    told = published(writer.newest)
    assert told == {"logged": {"lr": 0.5}, "logged_not_finite": {"loss": "nan", "up": "inf"}}
    record = msgspec.convert({"generation": 1, "world_size": 1, "step": 2, "steps_per_s": 1.0, "loss": None,
                              "wall_s": 9.0, **told}, ProgressRecord)  # fmt: skip
    assert decode(ProgressRecord, encode(record)) == record
    assert writer._thread is None
    writer.close()


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = MetricFiles(tmp_path)
    for generation, begun, step in ((1, 0, 1), (1, 0, 2), (1, 0, 3), (2, 1, 2), (2, 1, 3), (2, 1, 4)):
        files.take(generation, begun, row(step, loss=float(10 * generation + step)), repeated=False)
    files.close()
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(s.step, s.value) for s in reader.Scalars("loss")] == [(1, 11.0), (2, 22.0), (3, 23.0), (4, 24.0)]
