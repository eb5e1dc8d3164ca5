"""etcd behind TLS with client certificates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.etcd_server import EtcdServer
from support.wait import eventually, holds

from elastic.etcd import client, wire
from elastic.etcd.client import Etcd, EtcdAccess, EtcdError, EtcdUnavailable, View

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, server.pem, server.key, client.pem, client.key"""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=folder, check=True, capture_output=True, timeout=30)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[EtcdServer]:
    made = EtcdServer()
    made._args = (
        f"--listen-client-urls=https://{made.endpoint}",
        f"--advertise-client-urls=https://{made.endpoint}",
        f"--cert-file={certificates}/server.pem",
        f"--key-file={certificates}/server.key",
        f"--trusted-ca-file={certificates}/ca.pem",
        "--client-cert-auth",
    )
    try:
        yield made.start(wait_s=0)
    finally:
        made.close()


def test_with_our_certificate_we_are_let_in(server: EtcdServer, certificates: Path) -> None:
    access = EtcdAccess(
        endpoints=(f"https://{server.endpoint}",),
        ca_file=f"{certificates}/ca.pem",
        cert_file=f"{certificates}/client.pem",
        key_file=f"{certificates}/client.key",
    )
    etcd = Etcd(access)
    try:
        eventually(lambda: _answers(etcd), 15)
        views: list[View] = []
        etcd.watch("/t/", views.append)
        kept = etcd.keep(3, 0.5, lambda reason: None)
        etcd.put("/t/a", b"1", kept.id)
        eventually(lambda: views and "/t/a" in views[-1].kvs, 5)
        assert [member.ok for member in etcd.members()] == [True]
    finally:
        etcd.close()


def test_files_that_are_replaced_are_read_again(server: EtcdServer, certificates: Path, tmp_path: Path) -> None:
    """As when a certificate has run out and is renewed: with one endpoint, too, whose connection is kept."""
    shutil.copy(certificates / "ca.pem", tmp_path)
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=unknown")
    argv = ["openssl", "req", "-x509", *key, "-keyout", "client.key", "-out", "client.pem"]
    subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    ca, cert, secret = (str(tmp_path / name) for name in ("ca.pem", "client.pem", "client.key"))
    etcd = Etcd(EtcdAccess(endpoints=(server.endpoint,), ca_file=ca, cert_file=cert, key_file=secret), call_s=1.0)
    try:
        with pytest.raises(EtcdUnavailable):
            etcd.get("/t")
        for name in ("client.pem", "client.key"):
            shutil.copy(certificates / name, tmp_path)
        eventually(lambda: _answers(etcd), 15)
    finally:
        etcd.close()


def test_renewed_certificates_are_used_while_the_old_connection_still_works(
    server: EtcdServer, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only after a failure: by then the old certificate may have expired on every node at once."""
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.05)
    names = ("ca.pem", "client.pem", "client.key")
    for name in names:
        shutil.copy(certificates / name, tmp_path)
    ca, cert, secret = (str(tmp_path / name) for name in names)
    etcd = Etcd(EtcdAccess(endpoints=(server.endpoint,), ca_file=ca, cert_file=cert, key_file=secret))
    try:
        eventually(lambda: _answers(etcd), 15)
        first = etcd._connected()
        views: list[View] = []
        etcd.watch("/renewed/", views.append)
        (tmp_path / "client.key").write_text("half written")
        holds(lambda: _answers(etcd) and etcd._connected() is first, 1.0)
        shutil.copy(certificates / "client.key", tmp_path)
        eventually(lambda: _answers(etcd) and etcd._connected() is not first, 15)
        etcd.put("/renewed/a", b"1")
        eventually(lambda: views and "/renewed/a" in views[-1].kvs, 15)
        assert not any(view.error for view in views), "the watch moved without losing contact"
    finally:
        etcd.close()


@pytest.mark.parametrize(
    "said",
    [
        "Ssl handshake failed: SSL_ERROR_SSL: error:10000412: SSLV3_ALERT_BAD_CERTIFICATE: alert number 42",
        "TSI_PROTOCOL_FAILURE; handshake read failed",
        "UNAVAILABLE: ipv4:127.0.0.1:37523: Unwrap failed (TSI_DATA_CORRUPTED)",  # etcd 3.5.16
    ],
)
def test_etcd_error_names_cert_file_however_grpc_reports_the_refusal(said: str) -> None:
    assert "refuses the client certificate (cert_file)" in wire._tls_trouble(said.lower())


@pytest.mark.parametrize("ca", [True, False])
def test_etcd_refuses_a_client_without_certificate(server: EtcdServer, certificates: Path, ca: bool) -> None:
    access = EtcdAccess(endpoints=(server.endpoint,), ca_file=f"{certificates}/ca.pem" if ca else "")
    etcd = Etcd(access, call_s=0.5)
    with pytest.raises(EtcdUnavailable, match=r"refuses the client certificate \(cert_file\)" if ca else "."):
        etcd.get("/t/a")
    etcd.close()


def _answers(etcd: Etcd) -> bool:
    try:
        return etcd.revision("/") > 0
    except EtcdUnavailable:
        return False


def test_an_expired_client_certificate_is_named_with_the_time(
    server: EtcdServer, certificates: Path, tmp_path: Path
) -> None:
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san", "-days", "0")
    argv = ["openssl", "x509", "-req", "-in", "client.csr", *sign, "-out", str(tmp_path / "old.pem")]
    subprocess.run(argv, cwd=certificates, check=True, capture_output=True, timeout=30)
    ca, secret, old = (
        str(path) for path in (certificates / "ca.pem", certificates / "client.key", tmp_path / "old.pem")
    )
    etcd = Etcd(EtcdAccess(endpoints=(server.endpoint,), ca_file=ca, cert_file=old, key_file=secret), call_s=1.0)

    def said() -> str:
        try:
            etcd.get("/t")
        except EtcdError as error:
            return str(error)
        return ""

    try:
        eventually(lambda: f"client certificate {old} expired at 20" in said(), 15)
    finally:
        etcd.close()
