"""Following a job's log until it is over: `elasticctl logs -f` and `elasticctl run`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TextIO

import click

from elasticd.api.views.columns import failed_first
from elasticd.base import safe_text
from elasticd.base.answers import Job, JobDetail, Progress
from elasticd.ctl.client import Client, Failed, Json, Unreachable, name
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import INTERRUPTED, OF_PHASE, OVER, TERMINATED, DaemonRestarts, command, length, read, streamed

from . import stopping

NAME_REUSED = "a new job now uses the name {}; the result of the previous one was not recorded"

_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """One line at the bottom of a terminal, replaced as the job progresses; nothing without a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._on = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._shown = ""

    def show(self, text: str) -> None:
        if self._on:
            self._shown = text
            width = shutil.get_terminal_size().columns
            self._out.write(_CLEAR + safe_text.line(text)[: width - 1])
            self._out.flush()

    def clear(self) -> None:
        """Before other output; `again` puts it back."""
        if self._on and self._shown:
            self._out.write(_CLEAR)
            self._out.flush()

    def again(self) -> None:
        if self._shown:
            self.show(self._shown)


class Tracebacks:
    """Each traceback once: of a worker that fails as one before it did, its last line alone is shown."""

    MOST_LINES = 500

    def __init__(self) -> None:
        self._begun: dict[str, list[str]] = {}
        self._shown: dict[tuple[str, ...], str] = {}

    def shown(self, message: str) -> bool:
        """Whether a traceback that ends with the first line of `message` was shown."""
        return any(lines[-1] == message.partition("\n")[0] for lines in self._shown)

    def lines(self, source: str, line: str) -> list[str]:
        """What to show now that `source` has printed `line`: nothing while it is within a traceback."""
        begun = self._begun.get(source)
        if begun is None:
            if line.rstrip() != "Traceback (most recent call last):":
                return [line]
            self._begun[source] = [line]
            return []
        begun.append(line)
        if line.startswith(" ") and len(begun) < self.MOST_LINES:
            return []
        del self._begun[source]
        if first := self._shown.get(key := tuple(begun)):
            return [f"{line}   (as {'above' if first == source else f'[{first}]'})"]
        self._shown[key] = source
        return begun

    def rest(self) -> Iterator[tuple[str, list[str]]]:
        """What no further line has ended."""
        while self._begun:
            yield self._begun.popitem()


def show(
    client: Client, job: str, *, follow: bool, rank: int | None, tail: int, as_json: bool, notes: bool = False,
    slots: Container[int] | None = None, chosen: Mapping[str, object] | None = None, stamps: bool = False,
) -> Json:  # fmt: skip
    """Print lines until the stream ends; returns its last message, {} if it broke. `notes`: also events of the job, and
    on a terminal its progress. `slots`: print the lines of workers in these alone. `chosen`: further parts of the
    query. `stamps`: before each line that is followed, the time at which it arrived."""
    foot, tracebacks = ProgressLine(sys.stderr), Tracebacks()
    query: dict[str, object] = {"tail": tail, "follow": int(follow), "progress": int(notes and not as_json)}
    query |= chosen or {}
    began_s = time.monotonic()
    if rank is not None:
        query["rank"] = rank
    end: Json = {}
    as_shown = safe_text.output if sys.stdout.isatty() else str  # into a pipe or a file: as the worker wrote it

    def write(source: str, lines: list[str]) -> None:
        foot.clear()
        stamp = _stamp(time.monotonic() - began_s, follow) if stamps else ""
        sys.stdout.write("".join(f"{stamp}[{source}] {as_shown(line)}\n" for line in lines))
        sys.stdout.flush()
        foot.again()

    path, restarts = f"/v1/jobs/{name(job)}/logs", follow and not notes  # `until_over` endures them itself
    try:
        for message in streamed(client, path, query, lambda _: {"tail": 0}) if restarts else client.lines(path, query):
            if message.get("end"):
                end = message
            if slots is not None and "line" in message and message["slot"] not in slots:
                continue
            if as_json:
                sys.stdout.write(json.dumps(message) + "\n")
            elif "progress" in message:
                foot.show(progress_text(read(message["progress"], Progress)))
                continue
            elif "note" in message:
                if notes or message.get("cut"):
                    foot.clear()
                    click.secho(safe_text.line(f"── {message['note']}"), fg="cyan", err=True)
                    foot.again()
            elif "line" in message:
                source = _source(message)
                write(source, tracebacks.lines(source, message["line"]) if notes else [message["line"]])
            sys.stdout.flush()
    finally:
        for source, lines in tracebacks.rest():
            write(source, lines)
        foot.clear()
    if not as_json and (elsewhere := end.get("elsewhere")):
        where = ", ".join(f"{', '.join(map(str, ranks))} on {node}" for node, ranks in elsewhere.items())
        what = "not followed" if follow else "not shown"
        hint = f"({what}: rank {where}; one of them: elasticctl logs {job} --rank N{' -f' if follow else ''})"
        click.secho(safe_text.line(hint), dim=True, err=True)
    if not as_json and end.get("phase") == "failed":
        _tell_error(read(client.get(f"/v1/jobs/{name(job)}"), JobDetail), tracebacks)
    return end


def progress_text(row: Progress | Job) -> str:
    """'running  step 120  8.3 steps/s  loss 0.0123  world 4'."""
    parts = (
        row.phase,
        f"step {row.step}" if row.step is not None else "",
        f"{row.steps_per_s:.1f} steps/s" if row.steps_per_s and row.phase == "running" else "",
        f"loss {row.loss:.4g}" if row.loss is not None else "",
        f"world {row.world_size}" if row.world_size else "",
        f"waits for: {row.waiting_for}" if row.waiting_for else "",
    )
    return "  ".join(filter(None, parts))


def _tell_error(job: JobDetail, tracebacks: Tracebacks) -> None:
    """The rank that failed first, with its traceback unless that was shown."""
    if error := job.error:
        shown = tracebacks.shown(error.message)
        then = f"; all frames: elasticctl incidents {job.job} --full" if shown else ":"
        click.secho(f"── {failed_first(error)}{then}", fg="red", err=True)
        if not shown:
            click.echo(error.traceback.rstrip() or error.message, err=True)


def until_over(
    client: Client, job: str, as_json: bool, slots: Container[int] | None = None, began_s: float | None = None
) -> int:
    """Follow `job` to its end; returns its result as an exit code. Ctrl-C prompts. `slots` as for `show`. `began_s`:
    instant (monotonic) before its submission: logs of an earlier job of that name are not shown. Raises Failed once
    another job has taken the name: how that one ends is not the result of this one."""
    tail, restarts, submitted_wall_s = 1000, DaemonRestarts(), None
    with _terminated_in_words(job):
        while True:
            try:
                if submitted_wall_s is None:
                    submitted_wall_s = client.get(f"/v1/jobs/{name(job)}").get("submitted_wall_s")
                chosen = {} if began_s is None else {"since_s": time.monotonic() - began_s}
                end = show(
                    client, job, follow=True, rank=None, tail=tail, as_json=as_json, notes=True, slots=slots,
                    chosen=chosen,
                )  # fmt: skip
                data = client.get(f"/v1/jobs/{name(job)}", {"wait_over_s": 30}, timeout_s=40)
                restarts, tail = DaemonRestarts(), 0
                check_same(data, submitted_wall_s)
                if end and has_ended(data):
                    result = read(data, JobDetail)
                    if not as_json:
                        colour = "green" if result.phase == "succeeded" else "red"
                        click.secho(f"── {ended(result)}", fg=colour, err=True)
                    return OF_PHASE[result.phase]
            except (Unreachable, Failed) as error:
                restarts.endure(error)
                tail = 0
            except KeyboardInterrupt:
                if (code := _ask(client, job)) is not None:
                    return code
                tail = 0


def has_ended(data: Json) -> bool:
    """It is over on all nodes, with what its script does after training, which may still fail it."""
    members = data.get("members")
    return data["phase"] in OVER and not (isinstance(members, int) and members > 0)


def check_same(data: Json, submitted_wall_s: float | None) -> None:
    """Raises Failed if `data` is of another job than that of `submitted_wall_s`, and both are known."""
    its_wall_s = data.get("submitted_wall_s")
    if its_wall_s and submitted_wall_s and its_wall_s != submitted_wall_s:
        raise Failed(409, NAME_REUSED.format(data["job"]))


@contextmanager
def _terminated_in_words(job: str) -> Iterator[None]:
    """SIGTERM, e.g. from `timeout`, ends this command and not the job, with a message."""

    def end(*_: object) -> NoReturn:
        click.echo(f"\nterminated: {job} goes on; stop it with: elasticctl stop {job}", err=True)
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ask(client: Client, job: str) -> int | None:
    """Handle Ctrl-C: the exit code, or None to continue to follow."""
    if not sys.stdin.isatty():
        click.echo(f"\ndetached: {job} goes on; stop it with: elasticctl stop {job}", err=True)
        return INTERRUPTED
    try:
        answer = click.prompt(
            f"\n{job} runs. [d]etach and let it go on, [s]top it, or [f]ollow on?",
            type=click.Choice(["d", "s", "f"]), default="d", show_choices=False, err=True,
        )  # fmt: skip
    except (click.Abort, KeyboardInterrupt):
        answer = "d"
    if answer == "f":
        return None
    if answer == "s":
        stopping.stop(client, job, "stopped by Ctrl-C in elasticctl run")
        return None
    click.echo(f"detached: {job} goes on; follow it with: elasticctl logs -f {job}", err=True)
    return INTERRUPTED


def ended(job: Job) -> str:
    """'train has succeeded at step 468, loss 0.01234 (resumed from step 400: checkpoint step 400 at …)'."""
    at = f" at step {job.step}" if job.step else ""  # 0: none was made, or none is known of a plain script
    loss = f", loss {job.loss:.6g}" if job.loss is not None else ""
    reason = f": {job.reason}" if job.reason else ""
    if resumed := job.resumed:
        none = "without a step: all were made already; " if resumed.complete else ""
        reason += f" ({none}resumed from step {resumed.step}: {resumed.source})"
    return f"{job.job} has {'been stopped' if job.phase == 'stopped' else job.phase}{at}{loss}{reason}"


EARLIER_S = 0.5
"""Lines that come this soon after the request were written before it."""


def _stamp(after_s: float, follow: bool) -> str:
    """Time of day, or blanks for a line that was written before."""
    late = follow and after_s > EARLIER_S
    return f"{time.strftime('%H:%M:%S')} " if late else " " * 9


def _source(message: Json) -> str:
    """'3', 'slot 1', 'standby'; of another node with its name: '3 n2'."""
    node = f" {safe_text.line(message['node'])}" if message.get("node") else ""
    if message["rank"] is not None:
        return f"{message['rank']}{node}"
    return (f"slot {message['slot']}" if message["slot"] is not None else "standby") + node


@command()
@JOB
@click.option("-f", "--follow", is_flag=True, help="Go on as more is written, until the job is over.")
@click.option("--rank", type=int, help="Only this rank, on whatever node it runs.")
@click.option("-n", "--tail", default=100, show_default=True, help="Begin with so many lines of each node.")
@click.option("--since", "since_s", type=length, metavar="TIME",
              help="Only workers that have written within this time, e.g. 10m.")  # fmt: skip
@click.option("-p", "--previous", is_flag=True, help="The worker before the present one, in each slot.")
@click.option("--earlier", is_flag=True, help="Also of earlier jobs of this name.")
@click.option("-t", "--timestamps", is_flag=True, help="With -f: put before each line the time at which it arrived.")
def logs(
    client: Client, job: str, follow: bool, rank: int | None, tail: int, since_s: float | None, previous: bool,
    earlier: bool, timestamps: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show the output of JOB's workers, each line with its rank.

    Earlier lines come from all nodes. With -f the workers of this node are followed; with --rank one on any node.
    """
    if previous and follow:
        raise click.UsageError("--previous has ended: it cannot be followed")
    asked = {"previous": int(previous), "earlier": int(earlier), "since_s": since_s}
    chosen = {key: value for key, value in asked.items() if value}
    show(client, job, follow=follow, rank=rank, tail=tail, as_json=as_json, chosen=chosen, stamps=timestamps)
