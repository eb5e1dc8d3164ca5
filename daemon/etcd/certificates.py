"""Certificates of the embedded etcd for other machines: created once, stored in `<state_dir>/etcd/tls`.

    ca.pem, ca-key.pem              a certificate authority for this etcd only
    server.pem, server-key.pem      etcd's own
    client.pem, client-key.pem      required, with ca.pem, by every elasticd on another machine

All but the authority's are good for a year, and issued again in time while elasticd runs. etcd reads its own at each
handshake.

etcd serves a client only if ca.pem has signed the client's certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic.etcd.admin import USER
from elastic.util.files import read_file, replace_file
from elasticd.base.errors import CannotStart
from elasticd.base.ownership import lent, private

CA_DAYS = 3650
VALID_DAYS = 365
RENEWED_DAYS = 120
"""Before its end a certificate is issued again. Other nodes have so long to copy that of clients."""
CLOCK_SKEW = datetime.timedelta(days=1)
"""Certificates are valid from a day before their creation: the clock of another node may be behind."""


def ensure(folder: Path, names: Sequence[str], gid: int | None = None) -> None:
    """Create missing files, and issue again what expires within RENEWED_DAYS: by the same authority, so that what was
    issued before stays good until its own end. `names`: host names and addresses by which etcd is reached; a server
    certificate that lacks one of them is issued again, too. `gid`: of etcd, where it runs as another user. Raises
    CannotStart."""
    try:
        import cryptography.x509  # noqa: F401 - asks whether the package is there
    except ImportError:
        raise CannotStart(
            "etcd.embedded_listen needs certificates, and the package cryptography, which makes them, is not "
            "installed (pip install 'elasticd[embedded]')"
        ) from None
    try:
        if gid is None:
            private(folder)
        else:
            lent(folder, gid, 0o710)
        if not _good(folder / "ca.pem"):
            _make(folder, "ca", f"elasticd etcd CA {secrets.token_hex(4)}", (), authority=True)
            for name in ("client.pem", "server.pem"):
                (folder / name).unlink(missing_ok=True)
        if not _good(folder / "client.pem"):
            _make(folder, "client", USER, ())
        if not _good(folder / "server.pem") or not set(names) <= _names_in(folder / "server.pem"):
            _make(folder, "server", "etcd", names)
        if gid is not None:
            for name in ("ca.pem", "server.pem", "server-key.pem"):
                os.chown(folder / name, -1, gid)
                os.chmod(folder / name, 0o640)
    except (OSError, ValueError) as error:
        raise CannotStart(f"the embedded etcd's certificates in {folder}: {error}") from error


def _good(certificate: Path) -> bool:
    """Whether it is there, and not about to expire."""
    from cryptography import x509

    try:
        loaded = x509.load_pem_x509_certificate(read_file(certificate))
    except FileNotFoundError:
        return False
    return loaded.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=RENEWED_DAYS)


def _make(folder: Path, name: str, subject: str, names: Sequence[str], *, authority: bool = False) -> None:
    """Write NAME-key.pem, then NAME.pem: a certificate that exists has its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key, issuer = key, _name(subject)
    if not authority:
        issuer_key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)  # type: ignore[assignment,unused-ignore]
        issuer = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()).subject
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS if authority else VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
    )
    if not authority:  # etcd's own gateway uses the server's certificate as a client's
        usage = [ExtendedKeyUsageOID.SERVER_AUTH] if names else []
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([*usage, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(folder / f"{name}-key.pem", secret)
    replace_file(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _name(common: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names_in(certificate: Path) -> set[str]:
    from cryptography import x509

    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        return set()
    return {str(name.value) for name in names}
