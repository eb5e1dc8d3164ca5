"""A store that any host can write into, and an attacker on a connection of its own who does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks, run_ranks  # noqa: F401 - a fixture
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.util.sealed_store import SEAL_NBYTES, SealedStore, StoreAltered
from elastic.worker.comm import group as group_module
from elastic.worker.comm.errors import FormError, is_communication_error
from elastic.worker.comm.group import Group

SECRET = "5ec4e7" * 5
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def connect(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, None, False, timeout=TIMEOUT, wait_for_workers=False)


@pytest.fixture
def attacker(server: TCPStore) -> TCPStore:
    return connect(server)


@pytest.fixture
def one(server: TCPStore) -> SealedStore:
    return SealedStore(connect(server), SECRET)


@pytest.fixture
def two(server: TCPStore) -> SealedStore:
    return SealedStore(connect(server), SECRET)


def test_ranks_read_what_ranks_have_written(one: SealedStore, two: SealedStore) -> None:
    one.set("text", "a")
    one.set("bytes", b"\0\xff")
    one.set("nothing", b"")
    assert [two.get(k) for k in ("text", "bytes", "nothing")] == [b"a", b"\0\xff", b""]
    one.multi_set(["m1", "m2"], ["1", b"2"])
    assert two.multi_get(["m1", "m2"]) == [b"1", b"2"]
    assert (one.compare_set("c", "", "mine"), two.compare_set("c", "", "theirs")) == (b"mine", b"mine")
    assert two.compare_set("c", "mine", "theirs") == one.get("c") == b"theirs"
    assert (one.add("n", 2), two.add("n", 3)) == (2, 5)
    two.wait(["n"], TIMEOUT)
    assert (two.check(["n", "text"]), two.check(["none"]), two.delete_key("n"), two.check(["n"])) == (
        True, False, True, False,
    )  # fmt: skip
    PrefixStore("p", one).set("k", "through torch's C++")
    assert PrefixStore("p", two).get("k") == b"through torch's C++"
    assert (one.altered, two.altered) == ("", "")


def own_address(attacker: TCPStore) -> None:
    attacker.set("rank1", b"the attacker's address")


def seal_of_the_old(attacker: TCPStore) -> None:
    attacker.set("rank1", attacker.get("rank1")[:SEAL_NBYTES] + b"the attacker's address")


def value_of_another_key(attacker: TCPStore) -> None:
    attacker.set("rank1", attacker.get("rank0"))


def guessed_secret(attacker: TCPStore) -> None:
    SealedStore(attacker, "guess").set("rank1", b"the attacker's address")


def cut_short(attacker: TCPStore) -> None:
    attacker.set("rank1", attacker.get("rank1")[: SEAL_NBYTES - 1])


def emptied(attacker: TCPStore) -> None:
    attacker.set("rank1", b"")


def counter(attacker: TCPStore) -> None:
    attacker.delete_key("rank1")
    attacker.add("rank1", 7)


ATTACKS = [own_address, seal_of_the_old, value_of_another_key, guessed_secret, cut_short, emptied, counter]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_replaced_value_is_refused(
    one: SealedStore, two: SealedStore, attacker: TCPStore, attack: Callable[[TCPStore], None]
) -> None:
    one.set("rank0", b"10.0.0.1")
    one.set("rank1", b"10.0.0.2")
    one.num_keys()  # torch's set() does not wait for the server
    attack(attacker)
    attacker.num_keys()
    with pytest.raises(StoreAltered, match="no rank of this generation wrote: rank1") as caught:
        two.get("rank1")
    assert two.altered == "rank1"
    assert is_communication_error(caught.value), "a worker leaves the group for it, and keeps its state"
    with pytest.raises(StoreAltered):
        two.multi_get(["rank0", "rank1"])
    if attack is not emptied:  # an empty value counts as none here, and is replaced
        with pytest.raises(StoreAltered):
            two.compare_set("rank1", "", "mine")
    assert two.get("rank0") == b"10.0.0.1"


def test_a_value_of_another_generation_is_refused(one: SealedStore, server: TCPStore) -> None:
    one.set("rank1", b"10.0.0.2")
    with pytest.raises(StoreAltered):
        SealedStore(connect(server), SECRET[::-1]).get("rank1")


def test_an_error_of_the_store_passes_through_torchs_code(one: SealedStore, attacker: TCPStore) -> None:
    attacker.set("p/rank1", b"the attacker's address")
    with pytest.raises(StoreAltered):
        PrefixStore("p", one).get("rank1")
    with pytest.raises(dist.DistStoreError, match="timeout"):
        PrefixStore("p", one).wait(["none"], timedelta(seconds=0.05))


# ── a group ─────────────────────────────────────────────────────────────────────────────────────────────────


class Forged(SealedStore):
    """An attacker who knows all but the secret: takes every value, and seals with zeros."""

    def _seal(self, key: str, raw: bytes) -> bytes:
        return bytes(SEAL_NBYTES)

    def _opened(self, key: str, sealed: bytes) -> bytes:
        return sealed[SEAL_NBYTES:]


def attacked(rank: int, world_size: int, port: int, sealed: bool) -> Any:
    """Rank 1 is an attacker who takes part without the secret. `sealed` False: rank 0 believes it, as it did before
    there were seals."""
    if rank == 1 or not sealed:
        group_module.SealedStore = Forged  # type: ignore[misc]
    where: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": port, "generation": 1}
    group = Group(backend="gloo", rank=rank, world_size=world_size, store_secret=SECRET if rank == 0 else "", **where)
    told = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20), wait_for_workers=False)
    if rank == 1:
        forming = threading.Thread(target=lambda: form_quietly(group), daemon=True)
        forming.start()
        told.wait(["over"])
        group.abort("the attack is over")
        return None
    try:
        group.form()
        dist.barrier()
        return ["formed", group.altered]
    except FormError as error:
        return [str(error), group.altered]
    finally:
        told.set("over", "1")  # before the abort, which cuts every connection to the store
        group.abort("the attack is over")
        group.close()


def form_quietly(group: Group) -> None:
    with contextlib.suppress(Exception):
        group.form()
        dist.barrier()


@pytest.mark.slow
def test_a_rank_does_not_meet_one_without_the_secret() -> None:
    said, altered = run_ranks(attacked, world_size=2, sealed=True)[0]
    assert altered.startswith("g1/")
    assert altered in said
    assert run_ranks(attacked, world_size=2, sealed=False)[0] == ["formed", ""], "the attack works where none looks"


def forms_and_sums(rank: int, world_size: int, port: int) -> Any:
    """Groups of the script's own as well, whose addresses go through the store later."""
    where: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": port, "store_secret": SECRET}
    sums = []
    for generation in (1, 2):
        group = Group(backend="gloo", rank=rank, world_size=world_size, generation=generation, **where)
        group.form()
        ones = torch.ones(4)
        dist.all_reduce(ones, group=dist.new_group(list(range(world_size))))
        sums.append(float(ones[0]))
        group.close()
    return sums


@pytest.mark.slow
def test_groups_form_and_form_again_on_sealed_stores() -> None:
    assert run_ranks(forms_and_sums, world_size=3) == [[3.0, 3.0]] * 3


def later(rank: int, world_size: int, port: int) -> Any:
    """A value is replaced while the group of the generation is formed already."""
    where: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": port, "generation": 1}
    group = Group(backend="gloo", rank=rank, world_size=world_size, store_secret=SECRET, **where)
    group.form()
    attacker = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20), wait_for_workers=False)
    try:
        if rank == 1:
            attacker.wait(["refused"])
            return ["", True]
        assert group._store is not None
        attacker.set("g1/mine", b"forged")
        try:
            group._store.get("mine")
        except dist.DistStoreError as error:
            return [group.altered, is_communication_error(error)]
        return ["", False]
    finally:
        attacker.set("refused", "1")
        group.abort("over")
        group.close()


@pytest.mark.slow
def test_a_refusal_after_forming_is_kept_with_the_group() -> None:
    altered, communication = run_ranks(later, world_size=2)[0]
    assert altered == "g1/mine"
    assert communication
