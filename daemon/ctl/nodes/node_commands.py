"""Commands about nodes: clean up, drain with a preview and a wait, and the settings of one or of all."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from elasticd.base import safe_text
from elasticd.base.command_answers import Cleanup, Config, DrainPreview, NodeDetail, Removed, Setting
from elasticd.ctl.client import Client, Failed, Json, name
from elasticd.ctl.completion import NODE
from elasticd.ctl.output import ABSENT, ERROR, OK, WITHOUT_DAEMON, awaited, command, length, print_json, read, say

CLEANED_S = 300.0
"""A node may have a hundred thousand log files."""


@command()
@click.option("--dry-run", is_flag=True, help="Only show what it would remove.")
def gc(client: Client, dry_run: bool, as_json: bool) -> None:
    """Remove old job folders and logs from this daemon's node.

    Old is what the settings in [retention] do not keep: folders of jobs that etcd no longer has, logs of ended workers.
    The daemon does the same once an hour. Checkpoints stay.

    Exit code 1: not everything could be removed.
    """
    data = client.get("/v1/gc", timeout_s=CLEANED_S) if dry_run else client.post("/v1/gc", timeout_s=CLEANED_S)
    if as_json:
        print_json(data)
    else:
        cleanup = read(data, Cleanup)
        for line in lines(cleanup):
            click.echo(line)
        if not cleanup.jobs_known:
            click.echo("etcd cannot be reached: the folders of forgotten jobs stay until it can", err=True)
        for problem in cleanup.problems:
            click.echo(f"not removed: {problem}", err=True)
    sys.exit(ERROR if data["problems"] else OK)


def lines(cleanup: Cleanup) -> list[str]:
    """One line for each removal, and a summary."""
    rows = [f"{row.folder}: {_what(row)}, {row.mb:g} MB: {row.why}" for row in cleanup.removed]
    if not rows:
        return [f"{cleanup.node}: nothing to remove"]
    return [*rows, f"{cleanup.node}: {cleanup.freed_mb:g} MB {'would be freed' if cleanup.dry_run else 'freed'}"]


def _what(row: Removed) -> str:
    if row.what == "middle":
        return row.names[0]
    many = row.names[0] if len(row.names) == 1 else f"{len(row.names)} files"
    return f"folder with {many if row.names else 'no files'}" if row.what == "folder" else f"logs, {many}"


@command()
@NODE
@click.option("--reason", default="", help="Why, for the record and for status.")
def cordon(client: Client, node: str, reason: str, as_json: bool) -> None:
    """Assign no new work to NODE; running work continues."""
    data = client.post(f"/v1/nodes/{name(node)}/cordon", {"reason": reason} if reason else {})
    say(data, as_json, f"{node} takes no new work")


@command()
@NODE
def uncordon(client: Client, node: str, as_json: bool) -> None:
    """Undo a cordon or drain of NODE, and let the jobs that excluded it use it again."""
    data = client.post(f"/v1/nodes/{name(node)}/uncordon")
    text = f"{node} takes work again"
    if (state := data.get("state", "ready")) in WITHOUT_DAEMON:
        text = f"{node} may take work again, once its elasticd runs: now none does"
    elif state == "unhealthy":
        text = f"{node} is neither cordoned nor drained any more, and takes no work still: {data['reason']}"
    say(data, as_json, text)


@command()
@NODE
@click.option("--reason", default="", help="Why, for the record and for status.")
@click.option(
    "--deadline", "deadline_s", type=length, default="0", metavar="TIME",
    help="The node goes away after this long, empty or not: 1.5h.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only show what it would do to the jobs there.")
@click.option("--wait", "wait_", is_flag=True, help="Return when no agent of a job runs on NODE any more.")
@click.option("--timeout", "timeout_s", type=length, default="1h", show_default=True, metavar="TIME",
              help="With --wait: give up after this long, with exit code 1. The drain goes on.")  # fmt: skip
def drain(
    client: Client, node: str, reason: str, deadline_s: float, dry_run: bool, wait_: bool, timeout_s: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Move all work off NODE at a step boundary, and assign it no new work.

    A job that would fall below its minimum of nodes is named: it saves a checkpoint, if it has checkpoint.dir, and
    waits for another node.
    """
    data = client.get(f"/v1/nodes/{name(node)}/drain")
    rows = [] if as_json else [f"{'! ' * (row.effect == 'stops')}{row.text}" for row in read(data, DrainPreview).jobs]
    if dry_run:
        if as_json:
            print_json(data)
        for row in rows if rows or as_json else [safe_text.line(f"no job runs on {node}")]:
            click.echo(row)
        return
    body: Json = {"deadline_s": deadline_s} | ({"reason": reason} if reason else {})
    answer = client.post(f"/v1/nodes/{name(node)}/drain", body) | {"jobs": data["jobs"]}
    for row in rows:  # only now: it may have been refused
        click.echo(row, err=True)
    down = answer.get("state") in WITHOUT_DAEMON
    if down and answer["state"] in ABSENT:
        text = f"{node} is {answer['state']} {answer['reason']}; it takes no new work if it comes back"
        say(answer, as_json, text)
        sys.exit(ERROR if wait_ and answer["state"] == "lost" else OK)
    if not wait_:
        later = f"{node} takes no new work, and is drained when elasticd runs there again: now none does"
        say(answer, as_json, later if down else f"{node} is being drained")
        return
    left = until_empty(client, node, timeout_s)
    done = left.empty and left.state not in ABSENT
    text = f"{node} is drained: no agent runs there"
    if left.state in ABSENT:
        text = f"{node} is {left.state} {left.reason}"
    elif not left.empty:
        then = f"it is drained when elasticd runs on {node} again" if down else "the drain goes on"
        has = f"still has {', '.join(left.jobs)}" if left.jobs else "has not seen the drain"
        text = f"{node} {has} after {timeout_s:g} s; {then}"
    say(answer | {"jobs_left": left.jobs, "empty": left.empty, "state": left.state}, as_json, text, err=not done)
    sys.exit(OK if done else ERROR)


def until_empty(client: Client, node: str, timeout_s: float) -> NodeDetail:
    """The node once no agent runs there or its elasticd is lost, or at the timeout."""
    detail = NodeDetail()
    for data in awaited(client, f"/v1/nodes/{name(node)}", "wait_empty_s", timeout_s):
        if (detail := read(data, NodeDetail)).empty:
            break
    return detail


PLACES = ("/etc/elasticd/elasticd.toml",)
OF_A_NODE = frozenset({"node", "address", "interface", "slots", "socket", "state_dir", "http.listen", "page.listen",
                       "etcd.embedded_listen", "etcd.endpoints"})  # fmt: skip
"""Settings that may well differ between nodes."""
ANSWER_S = 30.0


@click.group()
def config() -> None:
    """Show, check and compare the settings of the daemons."""


@command("show", group=config)
@click.option("--explain", is_flag=True, help="With what each setting means.")
def show(client: Client, explain: bool, as_json: bool) -> None:
    """Settings in effect, the source of each, and the hierarchy of timeouts."""
    data = client.get("/v1/config")
    if as_json:
        return print_json(data)
    from elasticd.ctl.show import render

    return render.config(read(data, Config), explain)


@config.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Check FILE as elasticd would at its start, without starting it. Default: $ELASTICD_CONFIG, else the service's."""
    from elasticd.base.config import SettingSource, load
    from elasticd.base.errors import DaemonError

    given = os.environ.get("ELASTICD_CONFIG")
    path = file or (Path(given) if given else next((Path(p) for p in PLACES if os.path.exists(p)), None))
    if path is None:
        raise Failed(400, f"no FILE is given, and there is no {' or '.join(PLACES)}")
    try:
        loaded = load(path, {}, {})
    except DaemonError as error:
        raise Failed(400, str(error)) from None
    given_here = sum(source is SettingSource.FILE for source in loaded.sources.values())
    click.echo(safe_text.line(f"{path}: good ({given_here} settings, the others have their defaults)"))


@command("diff", group=config)
@click.option("--all", "every", is_flag=True, help="Also what is expected to differ: names, addresses, folders.")
def diff(client: Client, every: bool, as_json: bool) -> None:
    """Settings in which the nodes of the cluster differ. Exit code 1: there are some."""
    data = client.get("/v1/config", {"nodes": 1}, timeout_s=ANSWER_S)
    settings = {node: answer for node, answer in data["nodes"].items() if "settings" in answer}
    rows = differences({node: read(answer, Config).settings for node, answer in settings.items()})
    if not every:
        rows = {name: values for name, values in rows.items() if name not in OF_A_NODE}
    silent = {node: answer["error"] for node, answer in data["nodes"].items() if "error" in answer}
    if as_json:
        print_json({"schema": 1, "differences": rows, "unanswered": silent})
    else:
        for name, values in rows.items():
            click.echo(f"{name}:")
            for value, nodes in sorted(values.items()):
                click.echo(safe_text.line(f"    {value or '(empty)'}  on {', '.join(nodes)}"))
        if not rows:
            same = len(data["nodes"]) - len(silent)
            click.echo(f"{same} nodes have the same settings" if same > 1 else "one node answers: nothing to compare")
        for node, why in silent.items():
            click.secho(safe_text.line(f"{node}: {why}"), fg="red", err=True)
    sys.exit(ERROR if rows or silent else OK)


def differences(settings: Mapping[str, list[Setting]]) -> dict[str, dict[str, list[str]]]:
    """Setting -> value as text -> nodes, of the settings that are not the same on all nodes."""
    by_setting: dict[str, dict[str, list[str]]] = {}
    for node, rows in sorted(settings.items()):
        for row in rows:
            text = ", ".join(map(str, row.value)) if isinstance(row.value, list) else str(row.value)
            by_setting.setdefault(row.name, {}).setdefault(text, []).append(node)
    return {name: values for name, values in by_setting.items() if len(values) > 1}
