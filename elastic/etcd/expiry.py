"""When a certificate expires, read from its PEM file without a TLS library: daemons and agents name it in time."""

from __future__ import annotations

import binascii
import calendar
import time
from pathlib import Path

from elastic.contract.agent_files import EtcdAccess

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_VERSION, _UTC_TIME = 0xA0, 0x17


def expires_wall_s(path: str) -> float | None:
    """When the last of the certificates in this file expires (a bundle of authorities may hold old ones). None: it
    cannot be read, or is no certificate."""
    try:
        blocks = [block.partition(_END)[0] for block in Path(path).read_bytes().split(_BEGIN)[1:]]
        return max((_not_after(binascii.a2b_base64(block)) for block in blocks), default=None)
    except (OSError, ValueError, IndexError, OverflowError):
        return None


def expired(access: EtcdAccess, wall_s: float) -> str:
    """'client certificate /etc/client.pem expired at 2026-11-27 14:52'; empty: none of `access` has."""
    named = ("client certificate", access.cert_file), ("certificate authority", access.ca_file)
    for what, path in named:
        if path and (until_s := expires_wall_s(path)) is not None and until_s <= wall_s:
            return f"{what} {path} expired at {clock(until_s)}"
    return ""


def clock(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s))


def _not_after(der: bytes) -> float:
    """notAfter of an X.509 certificate in DER (RFC 5280, 4.1)."""
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    tag, _, end = _element(der, at)
    at = end if tag == _VERSION else at
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # Validity
    _, _, at = _element(der, at)  # notBefore
    tag, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = f"{'19' if text >= '5' else '20'}{text}"
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """(tag, where its content begins, where it ends)."""
    tag, length, at = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(der[at : at + size], "big"), at + size
    return tag, at, at + length
