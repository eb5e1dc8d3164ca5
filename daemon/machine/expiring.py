"""Certificates that this node uses, and the words before and after they expire. Pure but for `look`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from elastic.etcd.expiry import clock, expires_wall_s
from elasticd.base.answers import Certificate, Finding
from elasticd.base.settings import Settings

from .doctor import ERROR, OK, WARNING

DAY_S = 86400.0
WARN_DAYS = 30.0
"""The doctor warns from then on; status does in the last `SOON_DAYS`."""
SOON_DAYS = 14.0
FIX = "replace the file, and that of its key: both are taken into use within a minute"


def left(certificate: Certificate, wall_s: float) -> str:
    """'client certificate /c.pem expires in 9 days, at 2026-12-06 14:52'."""
    left_s = certificate.expires_wall_s - wall_s
    name, at = f"{certificate.what} {certificate.file}", clock(certificate.expires_wall_s)
    if left_s <= 0:
        return f"{name} expired at {at}"
    time_left = f"{left_s / DAY_S:.0f} days" if left_s >= 2 * DAY_S else f"{left_s / 3600:.0f} h"
    return f"{name} expires in {time_left}, at {at}"


def look(settings: Settings) -> tuple[Certificate, ...]:
    """Those of the connection to etcd, and of an embedded etcd that serves other nodes. Files that cannot be read are
    left out: that is told elsewhere."""
    named = [("client certificate", settings.etcd.cert_file), ("certificate authority", settings.etcd.ca_file)]
    if settings.etcd.embedded_listen and not settings.etcd.insecure:
        tls = Path(settings.state_dir) / "etcd" / "tls"
        named += [
            ("etcd's certificate", str(tls / "server.pem")),
            ("client certificate of the other nodes", str(tls / "client.pem")),
            ("certificate authority", str(tls / "ca.pem")),
        ]
    certificates = ((what, path, expires_wall_s(path)) for what, path in named if path)
    return tuple(
        Certificate(what=what, file=path, expires_wall_s=until_s)
        for what, path, until_s in certificates
        if until_s is not None
    )


def problems(certificates: Iterable[Certificate], wall_s: float) -> Iterator[str]:
    for each in certificates:
        if each.expires_wall_s <= wall_s:
            yield f"{left(each, wall_s)}: etcd's next connection with it fails; {FIX}"
        elif each.expires_wall_s - wall_s < SOON_DAYS * DAY_S:
            yield f"{left(each, wall_s)}: {FIX}"


def findings(certificates: Iterable[Certificate], wall_s: float) -> Iterator[Finding]:
    for each in certificates:
        left_s = each.expires_wall_s - wall_s
        if left_s >= WARN_DAYS * DAY_S:
            yield Finding("files", OK, left(each, wall_s))
        else:
            level = WARNING if left_s > 0 else ERROR
            yield Finding("files", level, left(each, wall_s), FIX)
