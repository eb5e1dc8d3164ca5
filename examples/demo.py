"""A demonstration of elasticd on this machine, in under two minutes: `make demo`. With --kill: its first half alone.

Two daemons with separate state directories act as two nodes; node a also runs the embedded etcd. A job of two workers
on each node trains a small GPT on the source of Python's standard library. Then faults are injected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path(sys.executable).parent
JOB = "gpt"
STEPS, STEPS_KILL = 400, 160
TAG = "ELASTIC_DEMO"
T = TypeVar("T")

console = Console(highlight=False)


class Failed(Exception):
    """The demo did not go as it should."""


def wait_for(check: Callable[[], T | None], deadline_s: float, what: str, every_s: float = 0.1) -> T:
    """The first true value that `check` returns. Raises Failed."""
    end_s = time.monotonic() + deadline_s
    while not (value := check()):
        if time.monotonic() > end_s:
            raise Failed(f"not within {deadline_s:g} s: {what}")
        time.sleep(every_s)
    return value


# ── nodes and processes ─────────────────────────────────────────────────────────────────────────────────────────


class Node:
    """One daemon; its agents and workers carry its tag in their environment."""

    def __init__(self, folder: pathlib.Path, name: str, etcd: str) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.socket = self.folder / "elasticd.sock"
        self.tag = f"{os.getpid()}.{name}"
        (self.folder / "elasticd.toml").write_text(
            f'cluster = "demo"\nnode = "{name}"\naddress = "127.0.0.1"\nslots = 2\nsocket = "{self.socket}"\n'
            f'state_dir = "{self.folder}"\n[http]\nlisten = ""\n[etcd]\n{etcd}\n'
        )

    def start(self) -> None:
        """Start elasticd; returns when it is ready."""
        with (self.folder / "daemon.log").open("ab") as log:
            subprocess.Popen(
                [BIN / "elasticd", "--config", self.folder / "elasticd.toml"],
                env=os.environ | {TAG: self.tag},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends them in order
            )
        wait_for(self._ready, 30.0, f"elasticd of node {self.name} is ready")

    def _ready(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return any(n["node"] == self.name and n["state"] == "ready" for n in self.ask("nodes")["nodes"])
        return False

    def ctl(self, *words: str) -> str:
        argv: list[str | os.PathLike[str]] = [BIN / "elasticctl", "--socket", self.socket, *words]
        env = os.environ | {"COLUMNS": str(console.width)}
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True, env=env).stdout

    def ask(self, *words: str) -> Any:
        """The output of elasticctl with --json. Exit codes 3 and 4 report the health: valid answers too."""
        argv: list[str | os.PathLike[str]] = [BIN / "elasticctl", "--socket", self.socket, *words, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode not in (0, 3, 4):
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return json.loads(done.stdout)


def tagged(tag: str) -> list[psutil.Process]:
    """Running processes with this tag in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            theirs = process.environ().get(TAG, "")
            if (theirs == tag or theirs.startswith(f"{tag}.")) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_all(tag: str) -> int:
    """SIGKILL them all, by process id, until none is left: new ones may start meanwhile. Returns how many."""
    killed = 0
    for _ in range(50):
        processes = tagged(tag)
        if not processes:
            return killed
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed += len(processes)
        psutil.wait_procs(processes, timeout=1.0)
    raise Failed(f"processes of {tag} do not end: {tagged(tag)}")


def _ended(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second must not interrupt the clean-up
    sys.exit(128 + number)


@contextlib.contextmanager
def cluster() -> Iterator[tuple[pathlib.Path, Node, Node]]:
    """Two ready nodes; everything is ended and removed at the end, also after Ctrl-C or a failure."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elastic-demo-"))
    a = Node(folder, "a", "")  # its daemon runs the embedded etcd
    b = Node(folder, "b", f'endpoints = ["unix:{a.folder}/etcd/client:0"]')
    signal.signal(signal.SIGTERM, _ended)
    try:
        a.start()
        b.start()
        yield folder, a, b
    except Failed:
        for log in sorted(folder.glob("*/daemon.log")):
            console.print(f"[dim]── the end of {log}[/]\n{log.read_text()[-1500:]}", markup=False)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kill_all(str(os.getpid()))
        shutil.rmtree(folder, ignore_errors=True)


# ── watching the job ────────────────────────────────────────────────────────────────────────────────────────────


class Watch:
    """The job, as reported by node a's daemon."""

    def __init__(self, node: Node, steps: int) -> None:
        self._node = node
        self.steps = steps
        self._said_s = 0.0
        self.losses: dict[int, float] = {}
        self.seen_incidents = 0

    def job(self) -> Any:
        row = self._node.ask("status", JOB)
        row = row.get("job", row) if isinstance(row.get("job"), dict) else row
        if row["phase"] in ("failed", "stopped"):
            raise Failed(f"the job has {row['phase']}: {row['reason']} {row['error'] or ''}")
        if row["loss"] is not None:
            self.losses[row["step"]] = row["loss"]
        return row

    def until(self, done: Callable[[Any], bool], deadline_s: float, what: str) -> Any:
        """Show the job's progress until `done(row)`."""

        def look() -> Any:
            row = self.job()
            if row["step"] and time.monotonic() - self._said_s > 2.0:
                self._said_s = time.monotonic()
                loss = f"{row['loss']:.3f}" if row["loss"] is not None else "–"
                console.print(
                    f"    step [bold]{row['step']:>4}[/] of {self.steps}   loss {loss}   {row['world_size']} workers   "
                    f"{row['steps_per_s'] or 0:.1f} steps/s   [dim]{row['waiting_for'] or ''}[/]"
                )
            return row if done(row) else None

        return wait_for(look, deadline_s, what, every_s=0.2)

    def steps_more(self, steps: int) -> Any:
        start = self.job()["step"] or 0
        return self.until(lambda row: (row["step"] or 0) >= start + steps, 60.0, f"{steps} more steps")

    def new_incident(self, deadline_s: float, world_size: int) -> Any:
        """The next incident after those shown that ends with this world size."""

        def look() -> Any:
            all_of_them = _recovered(self._node.ask("incidents", JOB)["incidents"])
            fresh = [i for i in all_of_them[self.seen_incidents :] if i["world_size_after"] == world_size]
            if fresh:
                self.seen_incidents = len(all_of_them)
            return fresh[-1] if fresh else None

        return wait_for(look, deadline_s, f"an incident that ends with {world_size} workers")


def _recovered(incidents: Any) -> list[Any]:
    return [incident for incident in incidents if not incident["open"]]


def _lost(incident: Any) -> str:
    least, most = incident["steps_lost"], incident["steps_lost_at_most"]
    if least is None:
        return "unknown"
    return str(least) if least == most else f"{least} or more" if most is None else f"{least} to {most}"


def _sum(numbers: list[int | None]) -> int | None:
    """The sum; None if one of them is unknown."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def show_incident(incident: Any) -> None:
    console.print(f"    [bold]{incident['detail'] or incident['kind']}[/]")
    for phase, at_s in sorted(incident["timeline_s"].items(), key=lambda item: item[1]):
        console.print(f"      {at_s * 1000:7.0f} ms  {phase}")
    console.print(
        f"    [green]{_lost(incident)} steps lost[/], {incident['world_size_before']} → "
        f"{incident['world_size_after']} workers, state from: {incident['restored_from']}\n"
    )


def say(title: str, why: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]\n  {why}")


# ── demonstration ───────────────────────────────────────────────────────────────────────────────────────────────


def submit(node: Node, folder: pathlib.Path, steps: int) -> None:
    job = folder / "job.toml"
    job.write_text(
        f'name = "{JOB}"\nscript = "{HERE / "train_gpt.py"}"\nargs = ["--steps", "{steps}"]\nworkdir = "{folder}"\n'
        f'nodes = "1:2"\nworkers_per_node = 2\n[checkpoint]\ndir = "{folder / "checkpoints"}"\nevery_s = 10\n'
    )
    node.ctl("submit", str(job))


def kill_a_worker(watch: Watch) -> None:
    # A daemon has the process ids of its own node's workers, and of those on the node of the job's leader.
    ranks = watch.until(lambda row: any(r["pid"] for r in row["ranks"]), 30.0, "the id of a worker")["ranks"]
    rank = max((row for row in ranks if row["pid"]), key=lambda row: row["rank"])
    say(
        f"2  kill -9 {rank['pid']}: the worker of rank {rank['rank']}",
        "With torchrun every process would be stopped, started anew, and sent\n"
        "  back to the last checkpoint. Here the others keep their process and\n"
        "  their state, and wait for the one replacement: it is forked from a\n"
        "  process that has torch imported, and gets the state from a survivor.",
    )
    psutil.Process(rank["pid"]).kill()
    show_incident(watch.new_incident(30.0, world_size=4))
    watch.steps_more(40)


def lose_a_node(watch: Watch, b: Node) -> None:
    say(
        "3  node b is lost: daemon, agent and workers, all at once",
        "No process deregisters. The job asked for 1 to 2 nodes, so it goes on\n"
        "  with one. The global batch stays the same: each worker takes a larger\n"
        "  part of it, and no sample is skipped or taken twice.",
    )
    killed = kill_all(b.tag)
    console.print(f"    {killed} processes killed")
    show_incident(watch.new_incident(40.0, world_size=2))
    watch.steps_more(40)


def bring_it_back(watch: Watch, b: Node) -> None:
    say(
        "4  node b comes back",
        "Its daemon registers, sees that the job has room, and starts an agent.\n"
        "  The running workers finish their step, and the newcomers join at that\n"
        "  boundary with the state as it is then.",
    )
    b.start()
    show_incident(watch.new_incident(60.0, world_size=4))


def finish(watch: Watch, a: Node, number: int) -> bool:
    say(f"{number}  to the end", "What is left of the steps, undisturbed.")
    watch.until(lambda row: row["phase"] == "succeeded", 120.0, "the job is done")
    console.print("\n[dim]$ elasticctl status[/]")
    console.print(a.ctl("status"), markup=False)
    incidents = _recovered(a.ask("incidents", JOB)["incidents"])
    total = {name: _sum([i[name] for i in incidents]) for name in ("steps_lost", "steps_lost_at_most")}
    first, last = (watch.losses[step] for step in (min(watch.losses), max(watch.losses)))
    table = Table(title="what the failures cost")
    for column in ("what happened", "workers", "seconds", "steps lost"):
        table.add_column(column, justify="left" if column == "what happened" else "right")
    for i in incidents:
        generations = f"{i['world_size_before']} → {i['world_size_after']}"
        table.add_row(i["detail"] or i["kind"], generations, f"{i['took_s'] or 0:.2f}", _lost(i))
    console.print(table)
    good = total["steps_lost"] == 0 and last < first
    console.print(f"{watch.steps} steps done, loss {first:.3f} → {last:.3f}, [bold green]{_lost(total)} steps lost[/]")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", action="store_true", help="a worker is killed, no node; under a minute")
    only_a_worker = parser.parse_args().kill
    steps = STEPS_KILL if only_a_worker else STEPS
    began_s = time.monotonic()
    say("elasticd: a failure costs about a second and at most one step", "Two nodes on this machine, two workers each.")
    with cluster() as (folder, a, b):
        watch = Watch(a, steps)
        say(
            "1  a job is submitted",
            "A small GPT learns to write Python from the standard library's own\n"
            "  source, examples/train_gpt.py: a plain PyTorch loop.",
        )
        submit(a, folder, steps)
        watch.until(lambda row: row["world_size"] == 4 and (row["step"] or 0) >= 30, 60.0, "the job steps on 4 workers")
        watch.seen_incidents = len(_recovered(a.ask("incidents", JOB)["incidents"]))
        kill_a_worker(watch)
        if not only_a_worker:
            lose_a_node(watch, b)
            bring_it_back(watch, b)
        good = finish(watch, a, 3 if only_a_worker else 5)
    console.print(f"[dim]{time.monotonic() - began_s:.0f} s in all; every process of the demo has been ended.[/]")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        console.print(f"[bold red]{failed}[/]")
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped; every process of the demo has been ended")
        sys.exit(130)
