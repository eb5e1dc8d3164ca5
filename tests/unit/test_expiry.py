"""When a certificate expires is read without a TLS library; words before and after."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest

from elastic.contract.agent_files import EtcdAccess
from elastic.etcd.expiry import expired, expires_wall_s
from elasticd.base.answers import Certificate
from elasticd.base.settings import EtcdSettings, Settings
from elasticd.machine import expiring
from elasticd.machine.doctor import ERROR, OK, WARNING

DAY_S = 86400.0


def pem(until: datetime.datetime) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(until)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("year", [2021, 2049, 2050, 2120])  # two digits of the year until 2049, four from 2050 on
def test_the_end_of_a_certificate_is_read(year: int, tmp_path: Path) -> None:
    until = datetime.datetime(year, 11, 27, 14, 52, 33, tzinfo=datetime.UTC)
    (tmp_path / "c.pem").write_bytes(b"text before\n" + pem(until))
    assert expires_wall_s(str(tmp_path / "c.pem")) == until.timestamp()
    old = pem(datetime.datetime(2020, 2, 1, tzinfo=datetime.UTC))
    (tmp_path / "c.pem").write_bytes(pem(until) + old)
    assert expires_wall_s(str(tmp_path / "c.pem")) == until.timestamp(), "a bundle is good while one of it is"


def test_what_is_no_certificate_has_no_end(tmp_path: Path) -> None:
    file, chance = tmp_path / "c.pem", random.Random(1)
    assert expires_wall_s(str(file)) is None
    good = pem(datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    for _ in range(300):
        damaged = bytearray(good[: chance.randint(0, len(good))])
        for _ in range(chance.randint(0, 3) if damaged else 0):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        assert isinstance(expires_wall_s(str(file)), float | None)


def test_the_expired_one_is_named(tmp_path: Path) -> None:
    for name, year in (("old.pem", 2021), ("new.pem", 2120)):
        (tmp_path / name).write_bytes(pem(datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)))
    old, new = str(tmp_path / "old.pem"), str(tmp_path / "new.pem")
    access = EtcdAccess(endpoints=("h:1",), ca_file=new, cert_file=old)
    assert expired(access, 1.7e9).startswith(f"client certificate {old} expired at 2021-01-01 ")
    assert expired(EtcdAccess(endpoints=("h:1",), ca_file=new, cert_file=new), 1.7e9) == ""
    settings = Settings(etcd=EtcdSettings(ca_file=new, cert_file=old, key_file="/none"))
    assert {(each.what, each.file) for each in expiring.look(settings)} == {
        ("client certificate", old), ("certificate authority", new),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("left_s", "said", "level"),
    [
        (-60.0, "client certificate /c.pem expired at ", ERROR),
        (3 * 3600.0, "client certificate /c.pem expires in 3 h, at ", WARNING),
        (9 * DAY_S, "client certificate /c.pem expires in 9 days, at ", WARNING),
        (20 * DAY_S, "", WARNING),
        (300 * DAY_S, "", OK),
    ],
)
def test_words_before_and_after(left_s: float, said: str, level: str) -> None:
    mine = (Certificate(what="client certificate", file="/c.pem", expires_wall_s=1e9 + left_s),)
    found = list(expiring.problems(mine, 1e9))
    assert [line.startswith(said) for line in found] == ([True] if said else [])
    assert all("replace the file" in line for line in found)
    (finding,) = expiring.findings(mine, 1e9)
    assert (finding.level, bool(finding.fix)) == (level, level != OK)
