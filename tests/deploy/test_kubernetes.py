"""The manifests call elasticctl and elasticd with options that exist, and name each other's objects."""

from __future__ import annotations

import re
import tomllib

import click
import msgspec
import pytest
from support.source import ROOT

from elasticd.base.settings import Settings
from elasticd.ctl.main import main
from elasticd.etcd.versions import VersionSupport, judge

FOLDER = ROOT / "deploy" / "kubernetes"
MANIFEST = (FOLDER / "elasticd.yaml").read_text()


@pytest.mark.parametrize("name", ["drain", "uncordon"])
def test_hooks_use_options_that_exist(name: str) -> None:
    assert isinstance(main, click.Group)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    calls = re.findall(rf"elasticctl {name} ([^;&\n\]]*)", MANIFEST)
    assert calls
    used = {flag for call in calls for flag in re.findall(r"--[a-z-]+", call)}
    assert used <= known


def test_settings_of_the_config_map_are_settings() -> None:
    _, _, rest = MANIFEST.partition("elasticd.toml: |\n")
    text = rest.partition("\n---")[0]
    settings = msgspec.convert(tomllib.loads("\n".join(line[4:] for line in text.splitlines())), Settings)
    assert settings.etcd.endpoints == ("etcd.elasticd.svc:2379",)


def test_etcd_is_of_a_version_without_known_faults() -> None:
    versions = re.findall(r"image: \S*/etcd:v(\S+)", (FOLDER / "etcd.yaml").read_text())
    assert [judge(version, members=3).support for version in versions] == [VersionSupport.SOUND]


def test_the_taint_of_the_docs_keeps_other_pods_away_and_not_elasticd() -> None:
    taint = re.findall(r"kubectl taint node NODE (\w+)=\w+:(\w+)", (ROOT / "docs" / "kubernetes.md").read_text())
    assert taint == re.findall(r"tolerations: \[{key: (\w+), operator: Exists, effect: (\w+)}]", MANIFEST)


def test_etcd_serves_the_name_that_the_daemons_use() -> None:
    etcd = (FOLDER / "etcd.yaml").read_text()
    assert "name: etcd\n  namespace: elasticd" in etcd
    assert "--client-cert-auth" in etcd
    assert len(re.findall(r"etcd-\d=https", etcd)) == int(re.findall(r"replicas: (\d)", etcd)[0])
