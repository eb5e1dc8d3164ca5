"""Certificates of the embedded etcd: good for a year, and issued again by the same authority long before their end."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from elasticd.etcd import certificates


def ends(path: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def in_days(days: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


class Later(datetime.datetime):
    days = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> datetime.datetime:
        return datetime.datetime.now(tz) + datetime.timedelta(days=cls.days)


def test_certificates_are_good_for_a_year_and_renewed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("server.pem", "client.pem")
    certificates.ensure(tmp_path, ["localhost"])
    first = {name: (tmp_path / name).read_bytes() for name in (*names, "ca.pem")}
    assert all(ends(tmp_path / name) < in_days(366) for name in names)
    certificates.ensure(tmp_path, ["localhost"])
    assert first == {name: (tmp_path / name).read_bytes() for name in first}, "nothing is issued again too early"
    later = type("Later", (), {"datetime": Later, "timedelta": datetime.timedelta, "UTC": datetime.UTC})
    monkeypatch.setattr(certificates, "datetime", later)
    Later.days = 365 - certificates.RENEWED_DAYS + 1
    certificates.ensure(tmp_path, ["localhost"])
    assert (tmp_path / "ca.pem").read_bytes() == first["ca.pem"], "what was issued before stays good"
    assert all(ends(tmp_path / name) > in_days(366) for name in names)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another group is given access")
def test_etcd_as_another_user_reads_its_own_key_and_no_other(tmp_path: Path) -> None:
    certificates.ensure(tmp_path, ["localhost"], 12345)
    found = {path.name: (path.stat().st_gid, oct(path.stat().st_mode & 0o777)) for path in tmp_path.iterdir()}
    assert {name for name, (gid, mode) in found.items() if (gid, mode) == (12345, "0o640")} == {
        "ca.pem", "server.pem", "server-key.pem"
    }  # fmt: skip
    assert found["client-key.pem"][1] == found["ca-key.pem"][1] == "0o600"
    assert oct(tmp_path.stat().st_mode & 0o777) == "0o710"
