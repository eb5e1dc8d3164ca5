"""Plain text to another machine, and secrets that others may read, are refused with the fix."""

from __future__ import annotations

import os
import pathlib

import pytest

from elasticd.base.errors import InvalidConfig
from elasticd.base.settings import EtcdSettings
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import why
from elasticd.etcd import trust

REMOTE, LOCAL = ("10.0.0.1:2379",), ("127.0.0.1:2379", "localhost:2379", "[::1]:2379")
USER = 1000


@pytest.fixture
def secret(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "secret"
    file.write_text("s")
    file.chmod(0o600)
    return file


def etcd(**fields: object) -> EtcdSettings:
    return EtcdSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("euid", [0, USER])
def test_etcd_on_another_machine_without_tls_is_refused(euid: int) -> None:
    with pytest.raises(InvalidConfig, match=r"10\.0\.0\.1:2379: without etcd\.ca_file all records .* etcd\.insecure"):
        trust.check(etcd(endpoints=REMOTE), euid)


def test_a_password_is_not_sent_in_plain_text(secret: pathlib.Path) -> None:
    with pytest.raises(InvalidConfig, match="the password and all records go over the network in plain text"):
        trust.check(etcd(endpoints=(*LOCAL, *REMOTE), user="u", password_file=str(secret)), secret.stat().st_uid)


def test_tls_loopback_and_insecure_are_accepted(secret: pathlib.Path) -> None:
    trust.check(etcd(endpoints=REMOTE, ca_file="ca.pem", user="u", password_file=str(secret)), secret.stat().st_uid)
    trust.check(etcd(endpoints=LOCAL), USER)
    trust.check(etcd(endpoints=REMOTE, insecure=True), 0)


def test_plain_text_that_is_allowed_is_a_problem_in_status() -> None:
    def problems(settings: EtcdSettings) -> list[str]:
        lines = why.of_cluster(Snapshot(), (), trust.in_plain_text(settings), 0.0)
        return [line for line in lines if "plain text" in line]

    (said,) = problems(etcd(endpoints=(*LOCAL, *REMOTE), insecure=True))
    assert "10.0.0.1:2379" in said
    assert problems(etcd(endpoints=LOCAL)) == problems(etcd(endpoints=REMOTE, ca_file="ca.pem")) == []


@pytest.mark.parametrize(
    ("mode", "readable", "refused"),
    [(0o600, False, ""), (0o640, False, ""), (0o400, True, ""), (0o644, True, ""), (0o644, False, "read or change it"),
     (0o660, False, "read or change it"), (0o604, False, "read or change it"), (0o666, True, "change it")],
)  # fmt: skip
def test_modes_of_secrets(secret: pathlib.Path, mode: int, readable: bool, refused: str) -> None:
    secret.chmod(mode)
    settings = etcd(endpoints=LOCAL, user="u", password_file=str(secret), allow_readable_secrets=readable)
    if not refused:
        return trust.check(settings, secret.stat().st_uid)
    with pytest.raises(InvalidConfig, match=rf"{refused} \(mode {mode:04o}\): chmod 600 .* defaultMode: 0400"):
        trust.check(settings, secret.stat().st_uid)
    return None


def test_credentials_of_systemd_are_accepted_with_any_mode(
    secret: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.chmod(0o444)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secret.parent))
    trust.check_secret("etcd.password_file", str(secret), USER)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secret.parent.parent))
    with pytest.raises(InvalidConfig):
        trust.check_secret("etcd.password_file", str(secret), USER)


def test_a_secret_of_another_user_is_refused(secret: pathlib.Path) -> None:
    if secret.stat().st_uid != 0:
        pytest.skip("not root")
    os.chown(secret, USER, USER)
    with pytest.raises(InvalidConfig, match=f"belongs to uid {USER}"):
        trust.check_secret("cluster key", str(secret), 0)
