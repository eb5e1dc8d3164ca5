"""Commands whose modules are imported only if they are called: `elasticctl status` must not pay for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

Commands = Mapping[str, click.Command]


def _lifecycle() -> Commands:
    from .jobs import lifecycle as ctl_lifecycle

    return ctl_lifecycle.COMMANDS


def _run() -> Commands:
    from .jobs import run_command

    return run_command.COMMANDS


def _top() -> Commands:
    from .jobs import top as ctl_top

    return ctl_top.COMMANDS


def _events() -> Commands:
    from .jobs import events as ctl_events

    return ctl_events.COMMANDS


def _completion() -> Commands:
    from . import completion as ctl_completion

    return ctl_completion.COMMANDS


def _drain() -> Commands:
    from .nodes import drain as ctl_drain

    return ctl_drain.COMMANDS


def _course() -> Commands:
    from .show import course as ctl_course

    return ctl_course.COMMANDS


def _doctor() -> Commands:
    from .nodes import doctor

    return doctor.COMMANDS


def _logs() -> Commands:
    from .jobs import logs

    return logs.COMMANDS


def _install() -> Commands:
    from .nodes import install

    return install.COMMANDS


def _bundle() -> Commands:
    from .nodes import bundle

    return bundle.COMMANDS


def _config() -> Commands:
    from .nodes import config_commands

    return config_commands.COMMANDS


def _gc() -> Commands:
    from .nodes import gc_command

    return gc_command.COMMANDS


def _debug() -> Commands:
    from .jobs import debug

    return debug.COMMANDS


MODULES: Mapping[str, Callable[[], Commands]] = {
    "run": _run,
    "wait": _lifecycle,
    "restart": _lifecycle,
    "forget": _lifecycle,
    "drain": _drain,
    "install-service": _install,
    "bundle": _bundle,
    "config": _config,
    "gc": _gc,
    "debug": _debug,
    "doctor": _doctor,
    "stacks": _doctor,
    "logs": _logs,
    "top": _top,
    "events": _events,
    "completion": _completion,
    "loss": _course,
    "report": _course,
}
"""Name of a command -> the function that imports its module."""


def command(name: str) -> click.Command | None:
    """The command of this name; None: there is none here."""
    return MODULES[name]()[name] if name in MODULES else None
