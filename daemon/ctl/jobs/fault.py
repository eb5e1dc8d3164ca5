"""`elasticctl fault`: strikes a worker of a job on purpose."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from elasticd.ctl.client import Client, Failed, name
from elasticd.ctl.completion import JOB
from elasticd.ctl.output import command, length, say

if TYPE_CHECKING:
    from elastic.testing.faults import InProcess

ANSWER_S = 10.0


@command()
@JOB
@click.argument("do", metavar="FAULT", type=click.Choice(["kill", "stop", "hang", "fail", "call"]))
@click.option("--rank", type=click.IntRange(0), required=True, help="Of the worker that is struck.")
@click.option("--for", "for_s", type=length, metavar="TIME", help="How long it is stopped, or hangs; else for good.")
@click.option(
    "--step", type=click.IntRange(1), help="With a plan: when so many steps are done; else as soon as it can."
)
@click.option("--place", help="With a plan: data, forward, backward, collective, optimizer or commit.")
@click.option("--signal", help="Of a kill; default: SIGKILL.")
@click.option("--inside", help="With a plan, of a hang: python or c.")
@click.option("--error", help="With a plan, of a fail: the exception, such as ValueError.")
@click.option("--message", help="With a plan, of a fail: its text.")
@click.option("--function", help="With a plan, of a call: module:function.")
def fault(client: Client, job: str, do: str, rank: int, as_json: bool, **options: Any) -> None:
    """Strike a worker of JOB on purpose: kill, stop, hang, fail or call.

    A job whose description names a plan of faults gets it added there. Any other one can be killed or stopped at once.
    The node of the worker is to be this one, and must allow it (allow_faults in its settings).
    """
    given = {key: value for key, value in options.items() if value is not None}
    wanted = _fault(do, rank, given)
    asked = {"do": do, "rank": rank, **given}
    data = client.post(f"/v1/jobs/{name(job)}/fault", asked, timeout_s=ANSWER_S + (options["for_s"] or 0.0))
    who = f"rank {rank} of {job}"
    if "plan" in data:
        _add(data["plan"], wanted, data["step"])
        text = f"{do} of {who} at step {data['step']}, in its {wanted.place}: added to {data['plan']}"
    else:
        who += f" (process {data['pid']} on {data['node']})"
        text = f"{data['signal']} sent to {who}"
        if data["for_s"]:
            text += f"; it {'ended' if data['ended'] else 'goes on'} after {data['for_s']:g} s"
    say(data, as_json, f"{text}. What follows: elasticctl incidents {job}")


def _fault(do: str, rank: int, given: dict[str, Any]) -> InProcess:
    """Raises UsageError for an option that the fault does not take, or a value that cannot be."""
    from elastic.testing.faults import BadFaultError, InProcess  # imports psutil, which only this command needs

    kind = next(kind for kind in get_args(InProcess) if kind.__struct_config__.tag == do)
    flags = {field: f"--{field.removesuffix('_s')}" for field in kind.__struct_fields__}
    if wrong := [f"--{key.removesuffix('_s')}" for key in given.keys() - flags.keys()]:
        raise click.UsageError(
            f"{do} takes no {', '.join(sorted(wrong))}: it takes {', '.join(sorted(flags.values()))}"
        )
    try:
        made: InProcess = kind(rank=rank, **given)
    except BadFaultError as error:
        raise click.UsageError(str(error)) from None
    except TypeError:
        raise click.UsageError(f"{do} needs --function MODULE:FUNCTION") from None
    return made


def _add(path: str, wanted: InProcess, step: int) -> None:
    """Add a fault to the plan, beside another one who does. Raises Failed."""
    import msgspec

    from elastic.testing.faults import BadFaultError, Plan

    file = Path(path).resolve()
    added = msgspec.structs.replace(wanted, step=step)
    try:
        while True:
            with file.open("r+b") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not os.path.samestat(os.fstat(held.fileno()), file.stat()):
                    continue  # it was replaced meanwhile
                Plan.read(file)  # says what is wrong with it
                plan = msgspec.json.decode(file.read_bytes(), type=Plan)  # its record stays relative to it
                if added in plan.faults:
                    raise Failed(409, f"{path} has it already, and a fault strikes once: name another --step")
                msgspec.structs.replace(plan, faults=(*plan.faults, added)).write(file)
                return
    except (BadFaultError, OSError) as error:
        raise Failed(409, f"it cannot be added to the job's plan: {error}") from error
