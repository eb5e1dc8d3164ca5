"""elasticctl install-service: what it writes, that it can be run again, and that it takes away what it wrote."""

from __future__ import annotations

import pathlib
import sys

import pytest
from click.testing import CliRunner

from elasticd.ctl.nodes.install import FILES, PLACES, install_service

BIN = pathlib.Path(sys.executable).parent


def run(root: pathlib.Path, *words: str) -> str:
    done = CliRunner().invoke(install_service, ["--root", str(root), *words])
    assert done.exit_code == 0, done.output
    return done.output


def files(root: pathlib.Path) -> dict[str, str]:
    return {f"/{p.relative_to(root)}": p.read_text() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


def test_install_writes_every_file_with_this_environments_programs(tmp_path: pathlib.Path) -> None:
    run(tmp_path)
    written = files(tmp_path)
    assert set(written) == set(PLACES.values())
    assert f"ExecStart={BIN}/elasticd --config" in written["/etc/systemd/system/elasticd.service"]
    assert "/opt/elasticd" not in written["/etc/systemd/system/elasticd.service"]
    assert (tmp_path / "usr/local/bin/elasticctl").readlink() == BIN / "elasticctl"


def test_install_again_changes_nothing_and_keeps_the_settings(tmp_path: pathlib.Path) -> None:
    run(tmp_path)
    settings = tmp_path / "etc/elasticd/elasticd.toml"
    settings.write_text("slots = 3\n")
    before = files(tmp_path)
    said = run(tmp_path)
    assert files(tmp_path) == before
    assert said.count("unchanged") == len(PLACES) - 1 + 2
    assert "elasticd.toml: kept" in said
    unit = tmp_path / "etc/systemd/system/elasticd.service"
    unit.write_text("of an earlier version")
    assert "replace /etc/systemd/system/elasticd.service" in run(tmp_path)
    assert files(tmp_path) == before


def test_dry_run_writes_nothing(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path, "--dry-run")
    assert "would write /etc/systemd/system/elasticd.service" in said
    assert not list(tmp_path.iterdir())


def test_uninstall_takes_away_what_was_written_and_nothing_else(tmp_path: pathlib.Path) -> None:
    run(tmp_path)
    own = tmp_path / "usr/local/bin/elasticd"
    own.unlink()
    own.write_text("of another program")
    run(tmp_path, "--uninstall")
    assert set(files(tmp_path)) == {"/etc/elasticd/elasticd.toml", "/usr/local/bin/elasticd"}
    assert not (tmp_path / "usr/local/bin/elasticctl").is_symlink()
    run(tmp_path, "--uninstall")


def test_every_file_of_the_package_is_installed() -> None:
    assert {path.name for path in FILES.glob("elasticd.*")} == set(PLACES)


def test_a_user_is_told_to_be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = CliRunner().invoke(install_service, [])
    assert done.exit_code == 1
    assert "as root" in done.output
