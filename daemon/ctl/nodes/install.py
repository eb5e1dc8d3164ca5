"""`elasticctl install-service`: elasticd as a service of systemd. It can be run again; `--uninstall` undoes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from elastic.util.files import replace_file
from elasticd.base.ownership import OPEN_PYTHON, closed_to
from elasticd.ctl.client import Failed

FILES = Path(__file__).parents[2] / "unit_files"
"""In the package: the wheel has them."""
PLACES = {
    "elasticd.service": "/etc/systemd/system/elasticd.service",
    "elasticd.slice": "/etc/systemd/system/elasticd.slice",
    "elasticd.sysusers": "/etc/sysusers.d/elasticd.conf",
    "elasticd.tmpfiles": "/etc/tmpfiles.d/elasticd.conf",
    "elasticd.toml": "/etc/elasticd/elasticd.toml",
}
SETTINGS = "elasticd.toml"
"""The administrator's: written if there is none, never replaced, never removed."""
PROGRAMS = ("elasticctl", "elasticd")
"""Linked into LINKS."""
LINKS = "/usr/local/bin"
UNIT_BIN = "/opt/elasticd/bin/"
"""The folder of the programs, as the unit's file in the package has it."""
AFTER_INSTALL = (
    ("systemd-sysusers", "/etc/sysusers.d/elasticd.conf"),
    ("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/elasticd.conf"),
    ("systemctl", "daemon-reload"),
)
BEFORE_REMOVAL = (("systemctl", "disable", "--now", "elasticd.service"), ("systemctl", "stop", "elasticd.slice"))
AFTER_REMOVAL = (("systemctl", "daemon-reload"),)
COMMAND_S = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    text: str
    """The action in words, for the screen."""
    act: Callable[[], object] | None
    """None: there is nothing to do."""


def install_steps(root: Path, programs: Path) -> Iterator[Step]:
    """`root`: '/', or a folder in its place. `programs`: the folder that holds elasticd and elasticctl."""
    for name, place in PLACES.items():
        target = _below(root, place)
        content = (FILES / name).read_text().replace(UNIT_BIN, f"{programs}/")
        if name == SETTINGS and target.exists():
            yield Step(f"{place}: kept as it is", None)
        elif _read(target) == content:
            yield Step(f"{place}: unchanged", None)
        else:
            what = "replace" if target.exists() else "write"
            yield Step(f"{what} {place}", lambda t=target, c=content: _write(t, c))  # type: ignore[misc]
    for program in PROGRAMS:
        link, target = _below(root, f"{LINKS}/{program}"), programs / program
        if link.is_symlink() and os.readlink(link) == str(target):
            yield Step(f"{LINKS}/{program}: unchanged", None)
        elif link.exists() and not link.is_symlink():
            yield Step(f"{LINKS}/{program}: kept, it is a program of its own", None)
        else:
            yield Step(f"link {LINKS}/{program} to {target}", lambda a=link, b=target: _link(a, b))  # type: ignore[misc]


def removal_steps(root: Path, programs: Path) -> Iterator[Step]:
    """The opposite; settings, state and groups stay."""
    for name, place in PLACES.items():
        target = _below(root, place)
        if name == SETTINGS:
            yield Step(f"{place}: kept", None)
        elif target.exists():
            yield Step(f"remove {place}", target.unlink)
    for program in PROGRAMS:
        link = _below(root, f"{LINKS}/{program}")
        if link.is_symlink() and os.readlink(link) == str(programs / program):
            yield Step(f"remove {LINKS}/{program}", link.unlink)


def _below(root: Path, place: str) -> Path:
    return root / place.lstrip("/")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _write(target: Path, content: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, content.encode())
    target.chmod(0o644)  # whatever the umask


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _command(argv: Sequence[str]) -> Step:
    def act() -> None:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(500, f"{' '.join(argv)}: {error}") from None
        if done.returncode:
            raise Failed(500, f"{' '.join(argv)} failed: {done.stderr.strip() or done.returncode}")

    return Step(" ".join(argv), act)


@click.command("install-service")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option(
    "--uninstall", is_flag=True, help="Stop the service and its jobs, and remove it. Settings and state stay."
)
@click.option("--now", is_flag=True, help="Enable and start the service as well.")
@click.option("--root", default="/", type=click.Path(path_type=Path), help="Write below this folder; run no command.")
def install_service(dry_run: bool, uninstall: bool, now: bool, root: Path) -> None:
    """Install elasticd as a service of systemd, from this Python environment. As root; it can be run again."""
    live = root == Path("/")
    if live and not dry_run and os.geteuid() != 0:
        raise click.ClickException("install-service writes to /etc: run it as root, or look first with --dry-run")
    if live and shutil.which("systemctl") is None:
        raise click.ClickException("there is no systemd on this machine: run elasticd itself, by another supervisor")
    programs = Path(sys.executable).parent
    if live and not uninstall and (why := closed_to(sys.executable)):
        raise click.ClickException(f"{why}, and jobs run as the users who submit them: {OPEN_PYTHON}")
    if uninstall:
        steps = [*map(_command, BEFORE_REMOVAL if live else ()), *removal_steps(root, programs),
                 *map(_command, AFTER_REMOVAL if live else ())]  # fmt: skip
    else:
        start = [("systemctl", "enable", "--now", "elasticd.service")] if now else []
        steps = [*install_steps(root, programs), *map(_command, [*AFTER_INSTALL, *start] if live else ())]
    try:
        for step in steps:
            click.echo(f"{'would ' if dry_run and step.act else ''}{step.text}")
            if step.act and not dry_run:
                step.act()
    except OSError as error:
        raise click.ClickException(f"{error.filename or ''}: {error.strerror or error}") from None
    if uninstall:
        click.echo("settings in /etc/elasticd, state in /var/lib/elasticd and the groups stay: remove them by hand")
    elif not now:
        click.echo("next: edit /etc/elasticd/elasticd.toml, then: systemctl enable --now elasticd; elasticctl doctor")
