"""Following a job's log until it is over: `elasticctl logs -f` and `elasticctl run`."""

from __future__ import annotations

import json
import sys
import threading
import time

import click

from .ctl_client import Client, Json, Unreachable, name

RECONNECT_S = 30.0
"""How long a daemon may be away (a restart, an upgrade) before we give up."""

AGAIN = threading.Event()
"""Never set: a daemon's coming back is no event that we could wait for."""

RESULTS = {"succeeded": 0, "failed": 4, "stopped": 1}


def show(
    client: Client, job: str, *, follow: bool, rank: int | None, tail: int, as_json: bool, notes: bool = False
) -> Json:
    """Print lines until the stream ends; returns its last message, {} when it broke."""
    query: dict[str, object] = {"tail": tail, "follow": int(follow)}
    if rank is not None:
        query["rank"] = rank
    end: Json = {}
    for message in client.lines(f"/v1/jobs/{name(job)}/logs", query):
        if message.get("end"):
            end = message
        if as_json:
            sys.stdout.write(json.dumps(message) + "\n")
        elif "note" in message:
            if notes:
                click.secho(f"── {message['note']}", fg="cyan", err=True)
        elif "line" in message:
            sys.stdout.write(f"[{_who(message)}] {message['line']}\n")
        sys.stdout.flush()
    if not as_json and (elsewhere := end.get("elsewhere")):
        where = ", ".join(f"{', '.join(map(str, ranks))} on {node}" for node, ranks in elsewhere.items())
        click.secho(f"(other ranks write on their own nodes: {where})", dim=True, err=True)
    if not as_json and end.get("phase") == "failed":
        _tell_error(client.get(f"/v1/jobs/{name(job)}"))
    return end


def _tell_error(data: Json) -> None:
    """The rank that failed first, with its traceback."""
    if error := data["error"]:
        step = f" at step {error['step']}" if error["step"] is not None else ""
        click.secho(f"── rank {error['rank']} on {error['node']} failed first{step}:", fg="red", err=True)
        click.echo(error["traceback"].rstrip() or error["message"], err=True)


def until_over(client: Client, job: str, as_json: bool) -> int:
    """Follow `job` to its end; returns its result as an exit code. Ctrl-C asks."""
    tail, gone_s = 1000, None
    while True:
        try:
            end = show(client, job, follow=True, rank=None, tail=tail, as_json=as_json, notes=True)
            data = client.get(f"/v1/jobs/{name(job)}", {"wait_over_s": 30}, timeout_s=40)
            gone_s, tail = None, 0
            if end and data["phase"] in RESULTS:
                return _result(data, as_json)
        except Unreachable:
            now_s = time.monotonic()
            gone_s = gone_s or now_s
            if now_s - gone_s > RECONNECT_S:
                raise
            tail = 0
            AGAIN.wait(0.3)
        except KeyboardInterrupt:
            if (code := _ask(client, job)) is not None:
                return code
            tail = 0


def _ask(client: Client, job: str) -> int | None:
    """What Ctrl-C means: None to go on following."""
    if not sys.stdin.isatty():
        click.echo(f"\ndetached: {job} goes on; stop it with: elasticctl stop {job}", err=True)
        return 130
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
        client.post(f"/v1/jobs/{name(job)}/stop", {"reason": "stopped by Ctrl-C in elasticctl run"})
        return None
    click.echo(f"detached: {job} goes on; follow it with: elasticctl logs -f {job}", err=True)
    return 130


def _result(data: Json, as_json: bool) -> int:
    phase = data["phase"]
    if not as_json:
        reason = f": {data['reason']}" if data["reason"] else ""
        click.secho(f"── {data['job']} has {'been stopped' if phase == 'stopped' else phase}{reason}",
                    fg="green" if phase == "succeeded" else "red", err=True)  # fmt: skip
    return RESULTS[phase]


def _who(message: Json) -> str:
    if message["rank"] is not None:
        return str(message["rank"])
    return f"slot {message['slot']}" if message["slot"] is not None else "standby"
