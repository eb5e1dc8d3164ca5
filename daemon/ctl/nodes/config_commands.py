"""`elasticctl config`: the settings in effect, whether a file of settings is good, and how nodes differ."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from elasticd.base import safe_text
from elasticd.ctl.client import Client, Failed
from elasticd.ctl.output import ERROR, OK, Json, command, print_json

PLACES = ("/etc/elasticd/elasticd.toml",)
OF_A_NODE = frozenset({"node", "address", "interface", "slots", "socket", "state_dir", "http.listen", "page.listen",
                       "etcd.embedded_listen", "etcd.endpoints"})  # fmt: skip
"""Settings that may well differ between nodes."""
ANSWER_S = 30.0


@click.group()
def config() -> None:
    """The daemon's settings."""


@command("show", group=config)
@click.option("--explain", is_flag=True, help="With what each setting means.")
def show(client: Client, explain: bool, as_json: bool) -> None:
    """Settings in effect, the source of each, and the hierarchy of timeouts."""
    data = client.get("/v1/config")
    if as_json:
        return print_json(data)
    from elasticd.ctl.show import render

    return render.config(data, explain)


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
    found = differences({node: answer["settings"] for node, answer in data["nodes"].items() if "settings" in answer})
    if not every:
        found = {name: values for name, values in found.items() if name not in OF_A_NODE}
    silent = {node: answer["error"] for node, answer in data["nodes"].items() if "error" in answer}
    if as_json:
        print_json({"schema": 1, "differences": found, "unanswered": silent})
    else:
        for name, values in found.items():
            click.echo(f"{name}:")
            for value, nodes in sorted(values.items()):
                click.echo(safe_text.line(f"    {value or '(empty)'}  on {', '.join(nodes)}"))
        if not found:
            same = len(data["nodes"]) - len(silent)
            click.echo(f"{same} nodes have the same settings" if same > 1 else "one node answers: nothing to compare")
        for node, why in silent.items():
            click.secho(safe_text.line(f"{node}: {why}"), fg="red", err=True)
    sys.exit(ERROR if found or silent else OK)


def differences(settings: Mapping[str, list[Json]]) -> dict[str, dict[str, list[str]]]:
    """Setting -> value as text -> nodes, of the settings that are not the same on all nodes."""
    found: dict[str, dict[str, list[str]]] = {}
    for node, rows in sorted(settings.items()):
        for row in rows:
            value = row["value"]
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.setdefault(row["name"], {}).setdefault(text, []).append(node)
    return {name: values for name, values in found.items() if len(values) > 1}
