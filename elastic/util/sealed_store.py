"""A store whose values carry a seal: only a holder of the generation's secret can write one that is accepted.

torch's TCPStore accepts values from any client that reaches its port. A rank's address in it decides which process its
peers exchange the model's state with, so a value is refused unless it was sealed under its key with the secret of its
generation. The secret is new in each generation, so a value of an earlier one is refused too.

Not sealed: counters (`add`), and whether a key exists (`check`, `wait`, `delete_key`, `num_keys`). The server itself
adds, and answers. A false answer makes ranks start too early or wait too long, which fails and is repaired; it changes
no value that they use. `append` and the queues are not offered: their values are joined by the server.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

SEAL_NBYTES = 16


class StoreAltered(dist.DistStoreError):
    """A value in the store was written by none of the generation's ranks."""


class DelegatingStore(Store):
    """A store that asks another one, for Python and for torch's back ends, which call these methods from C++.

    The object must live as long as a group that uses it: torch's C++ code does not keep it alive.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return bytes(self.store.compare_set(key, expected_value, desired_value))

    def add(self, key: str, value: int) -> int:
        return int(self.store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def wait(self, *args: Any) -> None:
        """Of the keys, and perhaps how long."""
        self.store.wait(*args)

    def delete_key(self, key: str) -> bool:
        return bool(self.store.delete_key(key))

    def num_keys(self) -> int:
        return int(self.store.num_keys())

    def list_keys(self) -> list[str]:
        return list(self.store.list_keys())

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self.store.timeout
        return found

    def clone(self) -> Store:
        """Itself: torch's C++ code would not keep another object of Python alive. It may be used by several threads."""
        return self


class SealedStore(DelegatingStore):
    """`store` with sealed values."""

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__(store)
        self._secret = secret.encode()
        self.altered = ""
        """The key of the first value that was refused; empty: none was. Back ends report an exception of a store in
        words of their own."""

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self.store.get(key))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._opened(*found) for found in zip(keys, self.store.multi_get(list(keys)), strict=True)]

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """`expected_value` '': the key is expected to be absent."""
        expected = self._sealed(key, expected_value) if expected_value else b""
        desired = self._sealed(key, desired_value)
        return self._opened(key, self.store.compare_set(key, expected, desired))

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return self._seal(key, raw) + raw

    def _opened(self, key: str, sealed: bytes) -> bytes:
        raw = sealed[SEAL_NBYTES:]
        if hmac.compare_digest(sealed[:SEAL_NBYTES], self._seal(key, raw)):
            return raw
        self.altered = self.altered or key
        raise StoreAltered(f"no rank of this generation wrote: {key}")

    def _seal(self, key: str, raw: bytes) -> bytes:
        name = key.encode()
        seal = hashlib.blake2b(len(name).to_bytes(4, "big") + name, digest_size=SEAL_NBYTES, key=self._secret)
        seal.update(raw)
        return seal.digest()
