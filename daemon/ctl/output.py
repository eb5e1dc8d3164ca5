"""What the command modules share: exit codes, the options --json and --as, how an answer is printed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from elasticd.base import safe_text

from .client import Client, Failed, Json, Unreachable

if TYPE_CHECKING:
    from elasticd.base.answers import Answer

    A = TypeVar("A", bound=Answer)

OK, ERROR, USAGE, DEGRADED, FAILED, NO_DAEMON, NO_ETCD, DENIED = range(8)
"""Exit codes, as docs/api.md lists them."""
INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal, as a shell has it
OF_PHASE = {"succeeded": OK, "failed": FAILED, "stopped": ERROR}
"""How a job has ended."""

OVER = ("succeeded", "failed", "stopped")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/api.md describes it.")


def command(name: str | None = None, group: Any = click) -> Callable[[Callable[..., Any]], click.Command]:
    """Decorator: a command with --json, which is given the client, its options as further decorators have them, and
    `as_json`."""

    def made(function: Callable[..., Any]) -> click.Command:
        with_json = as_json(click.pass_obj(function))
        parameters: list[click.Parameter] = vars(with_json)["__click_params__"]
        parameters.insert(0, parameters.pop())  # --json comes last in the help
        decorated: click.Command = group.command(name)(with_json)
        return decorated

    return made


AS_USER = click.option("--as", "user", default="", metavar="USER", help="Submit a job of this user; for root only.")


def print_json(data: Json) -> None:
    click.echo(json.dumps(data, indent=2))


def read(data: Any, kind: type[A], *, safe: bool = True) -> A:
    """An answer in its class. Raises Failed if it is one of another version."""
    import msgspec

    from elasticd.base import answers

    try:
        return answers.read(data, kind, safe=safe)
    except msgspec.ValidationError as error:
        raise Failed(0, f"elasticd's answer is not understood ({error}): install the same elasticd version") from None


RESTART_S = 30.0
"""How long a command that waits endures a daemon that does not answer (a restart, an upgrade)."""


class DaemonRestarts:
    """Of a command that waits: a daemon that has gone, or is back and has not reached etcd, is asked again for
    RESTART_S."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def endure(self, error: Unreachable | Failed) -> None:
        """Pause; raises `error` where it is another one, or has lasted for too long."""
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        if (isinstance(error, Failed) and error.status != 503) or now_s - self._since_s > RESTART_S:
            raise error
        time.sleep(0.3)


def awaited(client: Client, path: str, wait: str, timeout_s: float | None) -> Iterator[Json]:
    """The answer now, and as often as the daemon has waited (parameter `wait` of the query) in vain, until the timeout;
    None: there is none. After the first answer the daemon may restart."""
    from elasticd.base.answers import LONGEST_WAIT_S

    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    left_s, restarts = 0.0, None
    while left_s >= 0:
        try:
            data = client.get(path, {wait: left_s}, timeout_s=left_s + 10)
        except (Unreachable, Failed) as error:
            if restarts is None:
                raise
            restarts.endure(error)
            continue
        restarts = DaemonRestarts()
        yield data
        left_s = min(LONGEST_WAIT_S, left) if (left := end_s - time.monotonic()) > 0 else -1.0


def streamed(
    client: Client, path: str, query: Mapping[str, object], on_from: Callable[[Json], Mapping[str, object]]
) -> Iterator[Json]:
    """The lines of a stream until the one with `end`. After the first the daemon may restart: `on_from` says how the
    query changes after the last line that has come."""
    restarts: DaemonRestarts | None = None
    error: Unreachable | Failed
    while True:
        began_s = time.monotonic()
        try:
            for message in client.lines(path, query):
                query = {**query, **on_from(message)}
                yield message
                if message.get("end"):
                    return
            error = Unreachable("elasticd has ended the stream")
        except (Unreachable, Failed) as caught:
            if restarts is None:
                raise
            error = caught
        if restarts is None or time.monotonic() - began_s > RESTART_S:
            restarts = DaemonRestarts()
        restarts.endure(error)


def say(data: Json, as_json: bool, text: str, err: bool = False) -> None:
    """`data` as JSON if requested, else `text`."""
    if as_json:
        print_json(data)
    else:
        click.echo(safe_text.line(text), err=err)


ABSENT = ("lost", "off", "gone")
"""States of a node that has neither an elasticd that runs nor agents of jobs."""
WITHOUT_DAEMON = ("no daemon", *ABSENT)


def as_of(data: Json) -> None:
    """Say on stderr that an answer is as old as the last contact with etcd, if it is."""
    etcd = data.get("etcd")  # absent from a daemon of an earlier version
    if etcd and not etcd["connected"]:
        age = "" if etcd["age_s"] is None else f", {etcd['age_s']:.0f} s ago"
        text = f"etcd cannot be reached: this is as it was last seen{age} ({etcd['error'] or 'no answer'})"
        click.echo(safe_text.line(text), err=True)


_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LENGTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(s|m|min|h|d)?")


def length(text: str | float) -> float:
    """A length of time in seconds: '90', '90s', '10m', '2h', '7d'. A type for click's options."""
    if (match := _LENGTH.fullmatch(str(text).strip())) is None:
        raise click.BadParameter(f"{text!r} is no length of time: write seconds, or a number with s, m, h or d: 10m")
    return float(match[1]) * _UNITS[match[2] or "s"]
