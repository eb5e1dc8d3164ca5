"""`elasticctl bundle`: one archive for a bug report, with what the daemons know, and without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from elasticd.base import masking, safe_text
from elasticd.ctl.client import Client, Failed, Json, Unreachable, name
from elasticd.ctl.completion import job_names
from elasticd.ctl.output import NO_DAEMON, OVER

ANSWER_S = 60.0
JOURNAL_LINES = 5000
LOG_LINES = 2000
JOBS = 20
"""Jobs that are described in full, newest first."""
_ASSIGNED = re.compile(
    r"(?i)\b([A-Z0-9_]*(?:TOKEN(?!S|IZ)|SECRET|PASSW(?:OR)?D|API_?KEY|CREDENTIALS?)(?:_[A-Z0-9_]*)?"
    r"['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]+"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")


def without_secrets(text: str) -> str:
    """Hide what looks like a secret: NAME_TOKEN=value, passwords in URLs, private keys, bearer tokens."""
    text = _PEM.sub(masking.MASK, masking.masked_text(text))
    return _BEARER.sub(rf"\1 {masking.MASK}", _ASSIGNED.sub(rf"\g<1>{masking.MASK}", text))


@click.command()
@click.argument("job", required=False, shell_complete=job_names)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The archive. Default: elasticd-DATE.tar.gz here."
)
@click.option("--logs", "with_logs", is_flag=True, help="Also the last lines that the workers wrote.")
@click.pass_obj
def bundle(client: Client, job: str | None, output: Path | None, with_logs: bool) -> None:
    """Write one archive for a bug report.

    Status, settings, doctor, incidents, JOB or all jobs, stacks, journal. What looks like a secret is hidden; look
    through it before you send it. Exit code 5: no daemon answers, so that the archive has nothing but facts of this
    machine.
    """
    if job:  # one that does not exist, before anything is written
        with contextlib.suppress(Unreachable):  # told with the parts that are left out for it
            client.get(f"/v1/jobs/{name(job)}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = output or Path(f"elasticd-{stamp}.tar.gz")
    missing: dict[str, list[str]] = {}
    kept, away = [], False
    try:
        with contextlib.ExitStack() as cut:
            # For this user only: the masks are a guess, and another user's logs may be in it.
            private = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            cut.callback(target.unlink, missing_ok=True)  # half of one would be taken for a whole one
            with open(private, "wb") as whole, tarfile.open(fileobj=whole, mode="w:gz") as archive:
                for file, make in parts(client, job, with_logs):
                    try:
                        content = make()
                        kept.append(file)
                    except (Failed, Unreachable, OSError, ValueError, subprocess.SubprocessError) as error:
                        content = f"not to be had: {error}\n"
                        missing.setdefault(str(error), []).append(file)
                        away = away or isinstance(error, Unreachable)
                    raw = without_secrets(content).encode(errors="backslashreplace")
                    entry = tarfile.TarInfo(f"elasticd-{stamp}/{file}")
                    entry.size, entry.mtime, entry.mode = len(raw), int(time.time()), 0o600
                    archive.addfile(entry, io.BytesIO(raw))
            cut.pop_all()
    except FileExistsError:
        raise Failed(409, f"{target} is there already: name another with -o") from None
    except OSError as error:
        raise Failed(500, f"{target}: {error.strerror}") from None
    for why, files in missing.items():
        click.echo(safe_text.line(f"left out: {', '.join(files)}: {why}"), err=True)
    if away and "status.json" not in kept:
        what = f"{target} is written with {', '.join(kept)} only: what the daemon knows, all jobs too, is missing"
        click.echo(safe_text.line(what), err=True)
        sys.exit(NO_DAEMON)
    click.echo(safe_text.line(f"{target} is written. Secrets are hidden as far as they are known: look through it"))


def parts(client: Client, job: str | None, with_logs: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """(file in the archive, what makes its content)."""

    def answer(path: str, query: Json | None = None) -> Callable[[], str]:
        def make() -> str:
            data = client.get(path, query, timeout_s=ANSWER_S)
            return json.dumps(data | {"spec": masking.masked(data["spec"])} if data.get("spec") else data, indent=2)

        return make

    yield "about.json", lambda: json.dumps({"python": sys.version, "platform": platform.platform()}, indent=2)
    yield "status.json", answer("/v1/status")
    yield "doctor.json", answer("/v1/doctor")
    yield "settings.json", answer("/v1/config", {"nodes": 1})
    yield "incidents.json", answer("/v1/incidents", {"job": job or ""})
    yield "events.json", answer("/v1/events", {"last": 1000, "job": job or ""})
    yield "journal.txt", _journal
    rows = _jobs(client)
    for each in [job] if job else list(rows)[:JOBS]:
        yield f"jobs/{each}/job.json", answer(f"/v1/jobs/{name(each)}")
        if rows.get(each) not in OVER:
            yield f"jobs/{each}/stacks.json", answer(f"/v1/jobs/{name(each)}/stacks")
        if with_logs:
            yield f"jobs/{each}/logs.txt", lambda each=each: _lines(client, each)  # type: ignore[misc]


def _jobs(client: Client) -> dict[str, str]:
    """Job -> its phase."""
    try:
        rows = client.get("/v1/jobs")["jobs"]
    except (Failed, Unreachable):
        return {}  # noted by the other parts
    return {row["job"]: row["phase"] for row in rows}


def _lines(client: Client, job: str) -> str:
    messages = client.lines(f"/v1/jobs/{name(job)}/logs", {"tail": LOG_LINES})
    return "".join(f"[{m.get('node', '')} {m['slot']}] {m['line']}\n" for m in messages if "line" in m)


def _journal() -> str:
    if shutil.which("journalctl") is None:
        raise OSError("there is no journalctl here")
    argv = ["journalctl", "--unit=elasticd*", f"--lines={JOURNAL_LINES}", "--no-pager", "--output=short-iso"]
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=30, check=False).stdout
