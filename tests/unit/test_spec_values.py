"""What no process, path, timer or record can hold is refused when a job is submitted, with the field and the fix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.contract.job.spec import MAX_MESSAGE_CHARS, InvalidSpec, JobSpec, parse_job
from elastic.contract.records.job_records import SpecRecord, decode, encode

JOB = {"name": "j", "script": "/t.py"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"workers_per_node": 10**18},
            "workers_per_node = 1000000000000000000: a whole number from 1 to 1024, or 'auto'",
        ),
        ({"workers_per_node": "many"}, "workers_per_node = 'many': a whole number from 1 to 1024, or 'auto'"),
        ({"workers_per_node": 10**30}, "a whole number from 1 to 1024"),
        ({"on_loss": "x"}, "on_loss = 'x': 'wait' or 'shrink'"),
        ({"backend": 7}, "backend = 7: 'auto', 'gloo' or 'nccl'"),
        ({"standby": -1}, "standby = -1: a whole number from 0 to 8"),
        ({"hang": {"floor_s": 0}}, "hang.floor_s = 0: a number above 0"),
        ({"checkpoint": {"keep": "x"}}, "checkpoint.keep = 'x': a whole number from 1"),
        ({"args": ["a", 1]}, "args = .*: a list of texts"),
        ({"nodes": "1:99999999999"}, "nodes = '1:99999999999': write 'min:max'"),
        ({"nodes": "1:99999"}, "needs 1 <= min <= max <= 65536"),
        ({"nodes": "²"}, "nodes = '²': write 'min:max'"),
        ({"nodes": "1_0"}, "nodes = '1_0': write 'min:max'"),
        ({"env": {"A=B": "1"}}, "env: 'A=B' is no name of a variable: .* neither '=' nor NUL"),
        ({"env": {"": "1"}}, "env: '' is no name of a variable"),
        ({"env": {"A\0": "1"}}, "is no name of a variable"),
        ({"env": {"A": "x\0y"}}, r"env.A = 'x\\x00y': holds a NUL"),
        ({"env": {"LR": 0.1}}, "env.LR = 0.1: a text is needed: write it in quotes"),
        ({"env": {"A": "x" * 200_000}}, "env.A = 'x{100}'…: has 200000 characters: at most 100000"),
        ({"env": {f"A{i}": "" for i in range(10_001)}}, "env has 10001 variables: at most 10000"),
        ({"args": ["a", "b\0"]}, r"args\[1\] = 'b\\x00': holds a NUL"),
        ({"args": ["x" * 99_999] * 6}, "as a record: at most 524288"),
        ({"script": "/t\0.py"}, "script = .*holds a NUL"),
        ({"script": "/" + "x" * 300}, "a name in it is longer than 255 bytes"),
        ({"workdir": "/x" * 3000}, "workdir = .*longer than the 4095 bytes of a path"),
        ({"checkpoint": {"dir": "/a\0"}}, "checkpoint.dir = .*holds a NUL"),
        ({"checkpoint": {"keep": 10**30}}, r"checkpoint.keep = 1e\+30: at most 1000000000"),
        ({"stop_grace_s": 1e300}, r"stop_grace_s = 1e\+300: at most 1000000000"),
        ({"name": "x" * 100_000}, "name = .*: use 1 to 63"),
    ],
)
def test_refused_with_field_and_cure(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words) as refused:
        parse_job(JOB | fields)
    assert len(str(refused.value)) <= MAX_MESSAGE_CHARS + 3


def test_job_spec_accepts_ordinary_values() -> None:
    env = {"OMP_NUM_THREADS": "4", "a.b-c": "x=y", "EMPTY": "", "WORDS": 'he said "no"\n', "É": "ü"}
    spec = parse_job(JOB | {"env": env, "args": ["--lr", "0.1", ""], "workers_per_node": 1024, "nodes": "2:16"})
    assert spec.env == env


FIELDS = [f.name for f in msgspec.structs.fields(JobSpec)]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), ANYTHING, max_size=4))
@settings(max_examples=400, deadline=None)
def test_a_job_is_refused_or_can_be_written_and_read_back(fields: dict[str, Any]) -> None:
    try:
        spec = parse_job(JOB | fields)
    except InvalidSpec:
        return
    record = SpecRecord(spec=spec, submitted_wall_s=1.0, submitted_by="x")
    assert decode(SpecRecord, encode(record)) == record
