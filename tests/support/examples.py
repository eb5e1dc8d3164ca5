"""Each example as it stands, under a real agent with two workers: undisturbed, and beside it with one worker killed."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

from elastic.contract.records.job_records import Phase

from .agents import Job
from .source import ROOT

FOLDER = ROOT / "examples"
GUARD = 'if __name__ == "__main__":'
STRUCK = f"import sys\n\nsys.path.append({str(ROOT / 'tests')!r})\nimport support.struck\n\n"


@dataclasses.dataclass
class Ran:
    last: dict[int, tuple[int, str]]
    """rank -> (number of the last step, hash of the state there)"""
    pids: set[int]
    incidents: list[tuple[int | None, str | None]]
    """(steps lost, where the state came from) of each."""
    kills: set[str]


def job_of(name: str, args: dict[str, Any], env: dict[str, str], folder: pathlib.Path, kills: tuple[str, ...]) -> Job:
    """The script is the example's text, with one import more. `kills`: see support/struck.py."""
    folder.mkdir()
    text = (FOLDER / name).read_text()
    assert text.count(GUARD) == 1
    (folder / name).write_text(text.replace(GUARD, STRUCK + GUARD))
    told = {**env, "RECORD_DIR": str(folder), "KILL": ",".join(kills)}
    return Job(nodes="1", workers=2, script=folder / name, args=args, spec={"env": told})


def ran(job: Job, folder: pathlib.Path, deadline_s: float) -> Ran:
    job.wait_phase(Phase.SUCCEEDED, deadline_s)
    job.record = folder
    lines = job.lines()
    return Ran(
        last={line["rank"]: (line["step"], line["hash"]) for line in sorted(lines, key=lambda line: line["step"])},
        pids={line["pid"] for line in lines},
        incidents=[(i.steps_lost, i.restored_from) for i in job.incidents() if i.kind != "late exit"],
        kills={path.name for path in folder.glob("*:*:*")},
    )


def check_survives(
    name: str,
    args: dict[str, Any],
    folder: pathlib.Path,
    *kills: str,
    env: dict[str, str] | None = None,
    deadline_s: float = 60.0,
    alike: bool = True,
    goes_back: bool = False,
) -> None:
    """A killed worker costs no step and no other process, and the state at the end is that of an undisturbed run.
    `alike`: all ranks have the same state, also its plain values. `goes_back`: it costs the steps since a snapshot."""
    with contextlib.ExitStack() as stack:  # both at once: for half of their time jobs wait
        disturbed = stack.enter_context(job_of(name, args, env or {}, folder / "killed", kills))
        undisturbed = stack.enter_context(job_of(name, args, env or {}, folder / "whole", ()))
        whole = ran(undisturbed, folder / "whole", deadline_s)
        killed = ran(disturbed, folder / "killed", deadline_s)
    assert (killed.kills, whole.kills) == (set(kills), set()), "what was to be killed was"
    if goes_back:
        # Live where the survivors stood at the step of the snapshot.
        assert all(str(source).startswith(("snapshot", "live")) for _, source in killed.incidents), killed.incidents
        assert len(killed.incidents) == len(kills)
    else:
        assert killed.incidents == [(0, "live")] * len(kills), killed.incidents
    assert not whole.incidents
    assert (len(killed.pids), len(whole.pids)) == (2 + len(kills), 2), "no survivor was replaced"
    assert killed.last == whole.last, f"{killed.last} rather than {whole.last}"
    assert not alike or len(set(whole.last.values())) == 1, f"ranks with unlike states: {whole.last}"
