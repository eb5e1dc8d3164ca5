"""The cluster key: 32 random bytes, equal on all nodes, with which the records in etcd are signed.

See `elastic/etcd/signing.py` for what it protects, and docs/security.md for how to hand it out.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from elastic.etcd.client import KEY_BYTES, key_id
from elastic.util.files import replace_file
from elasticd.base.errors import CannotStart, InvalidConfig
from elasticd.base.settings import Settings

CREDENTIAL = "cluster.key"
"""Name of the systemd credential (LoadCredential=, SetCredentialEncrypted=)."""
SYSTEM = Path("/etc/elasticd/cluster.key")
"""Where a node that runs as root has it."""
NAME = "cluster.key"
"""Name of the key that the daemon of an embedded etcd generates, in its state directory."""
FIX = "copy it from another node of the cluster (mode 0600), or generate a new one with `elasticd --make-cluster-key`"


def find(settings: Settings) -> Path | None:
    """The file of the cluster key, None if there is none: the setting, a systemd credential, /etc/elasticd, the state
    directory, and beside the embedded etcd of another daemon of this user. Raises InvalidConfig."""
    if settings.cluster_key_file:
        path = Path(settings.cluster_key_file)
        if not path.exists():
            raise InvalidConfig(f"cluster_key_file = {str(path)!r}: there is no such file: {FIX}")
        return path
    places = [Path(settings.state_dir) / NAME]
    if os.geteuid() == 0:
        places.insert(0, SYSTEM)
    if folder := os.environ.get("CREDENTIALS_DIRECTORY"):
        places.insert(0, Path(folder) / CREDENTIAL)
    for endpoint in settings.etcd.endpoints:
        if endpoint.startswith("unix:/"):
            places.append(Path(endpoint.removeprefix("unix:")).parent.parent / NAME)
    return next((path for path in places if path.exists()), None)


def load(settings: Settings) -> bytes | None:
    """The cluster key; None if the cluster has none. Raises InvalidConfig."""
    path = find(settings)
    if path is None:
        return None
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cluster key {path}: cannot be read: {error}: {FIX}") from None
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise InvalidConfig(f"cluster key {path}: {2 * KEY_BYTES} hexadecimal digits are expected: {FIX}")
    return bytes.fromhex(text)


def make(settings: Settings) -> str:
    """Generate the key of a cluster with an etcd of its own, for `elasticd --make-cluster-key`. Returns what to tell
    the user. Raises InvalidConfig, CannotStart."""
    there = settings.cluster_key_file or find(settings)
    path = Path(there) if there else (SYSTEM if os.geteuid() == 0 else Path(settings.state_dir) / NAME)
    if path.exists():
        raise InvalidConfig(f"{path} exists already: a second key would make every record of the cluster invalid")
    return (
        f"{path}: generated, key {key_id(_write(path))}. Copy it to every node of the cluster (mode 0600, same owner), "
        "and restart elasticd there; stop the cluster's jobs before, since records without a signature are refused"
    )


def ensure_embedded(settings: Settings) -> None:
    """Generate the key of the embedded etcd, before its first start. An etcd that already has data keeps its records as
    they are: unsigned, if there is no key. Raises CannotStart."""
    state = Path(settings.state_dir)
    if find(settings) is None and not (state / "etcd" / "data").exists():
        _write(state / NAME)


def _write(path: Path) -> bytes:
    secret = secrets.token_bytes(KEY_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        replace_file(path, secret.hex().encode() + b"\n")
    except OSError as error:
        raise CannotStart(f"cluster key {path}: cannot be written: {error.strerror or error}") from error
    return secret
