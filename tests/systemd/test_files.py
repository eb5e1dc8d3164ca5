"""The files in systemd/: the example configuration is complete and true, the unit is free of typing errors."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import textwrap
import tomllib

import pytest
from support.source import ROOT

SYSTEMD = ROOT / "systemd"
SET_IN_THE_EXAMPLE = {"socket_group": "elasticd", "admin_group": "elasticd-admin"}


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def example() -> str:
    """The example configuration, from the settings and their documentation."""
    import msgspec

    from elasticd.base.config import explain
    from elasticd.base.settings import Settings

    lines = [
        "# Settings of elasticd. A line that begins with '#' and a name shows the default. `elasticctl config show`",
        "# prints what is in force, and where each value comes from.",
    ]
    docs = explain()
    table = ""
    for name, doc in sorted(docs.items(), key=lambda item: item[0].rpartition(".")[0]):
        inside, _, field = name.rpartition(".")
        if inside != table:
            lines += ["", f"[{inside}]"]
            table = inside
        owner = getattr(Settings(), inside) if inside else Settings()
        value = getattr(owner, field)
        lines += ["", *textwrap.wrap(doc, 110, initial_indent="# ", subsequent_indent="# ")]
        if name in SET_IN_THE_EXAMPLE:
            lines.append(f"{field} = {_toml(SET_IN_THE_EXAMPLE[name])}")
        else:
            assert isinstance(value, str | int | float | bool | tuple), f"{name}: {msgspec.to_builtins(value)}"
            lines.append(f"#{field} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def test_the_example_configuration_shows_every_setting_with_its_default() -> None:
    path = SYSTEMD / "elasticd.toml"
    if os.environ.get("ELASTIC_REWRITE"):
        path.write_text(example())
    assert path.read_text() == example(), "settings changed: run `make golden` and read the difference"


def test_the_example_configuration_is_accepted(tmp_path: pathlib.Path) -> None:
    from elasticd.base.config import load

    bare = load(SYSTEMD / "elasticd.toml", {}, {}).settings
    assert bare.socket_group == "elasticd"
    told = "\n".join(
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") else line
        for line in (SYSTEMD / "elasticd.toml").read_text().splitlines()
    )
    (tmp_path / "all.toml").write_text(told)
    assert len(tomllib.loads(told)) > 5
    assert load(tmp_path / "all.toml", {}, {}).settings == bare  # so what the comments show are the defaults


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_to_warn_of(tmp_path: pathlib.Path) -> None:
    """`systemd-analyze verify` exits 0 on unknown keys, so its output is read."""
    for name in ("elasticd.service", "elasticd.slice"):
        text = (SYSTEMD / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/elasticd/bin/elasticd", "/bin/true"))

    def verify() -> str:
        units = [str(tmp_path / name) for name in ("elasticd.service", "elasticd.slice")]
        done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=30)
        return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if str(tmp_path) in line)

    assert verify() == ""
    with (tmp_path / "elasticd.service").open("a") as unit:
        unit.write("\n[Service]\nRestartSteps=5\n")
    assert "RestartSteps" in verify()  # the test bites


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_fenced_in(tmp_path: pathlib.Path) -> None:
    text = (SYSTEMD / "elasticd.service").read_text().replace("/opt/elasticd/bin/elasticd", "/bin/true")
    (tmp_path / "elasticd.service").write_text(text)
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=35", str(tmp_path / "elasticd.service")],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout + rated.stderr
