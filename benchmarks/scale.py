"""How the control plane scales: simulated agents (the real loop, registry and recovery, a real etcd, no workers).

    python benchmarks/scale.py [--quick] [--max N]

For N = 8 … as many as asked: first forming, re-forming after one agent was lost, after 1 % were lost at once, and a
join; each until every agent holds the new generation. All N agents and etcd share this one machine's cores, so the
times contain the CPU of N nodes; the counts of writes do not. Torch's dynamic rendezvous is driven beside it.

Last line: {"reform_s_at_max", "agents_max", "writes_per_reform_at_max", "torch_ratio_at_32",
"steady_writes_per_s_at_max"}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
import psutil  # noqa: E402
from _scale_agents import Fleet  # noqa: E402
from support.etcd_server import EtcdServer  # noqa: E402

from elastic.core.keys import ClusterKeys  # noqa: E402
from elastic.core.records import SpecRecord, encode  # noqa: E402
from elastic.core.spec import JobSpec  # noqa: E402
from elastic.etcd import Etcd  # noqa: E402

SIZES = (8, 32, 64, 128, 256, 512, 1000)
TORCH_SIZES = (8, 16, 32, 64)
STEADY_S = 6.0
LIMIT_S = 120.0


class Row(msgspec.Struct):
    """Seconds, and changes of etcd's revision, per size."""

    agents: int
    form_s: float
    form_writes: int
    reform_s: float
    reform_writes: int
    percent_s: float
    join_s: float
    join_writes: int
    steady_writes_per_s: float
    cpu_ms_per_agent_s: float
    memory_mb_per_agent: float


def measure(count: int) -> Row:
    """One size, on an etcd of its own."""
    with EtcdServer(args=["--quota-backend-bytes", str(2**31)]) as server, tempfile.TemporaryDirectory() as folder:
        etcd = Etcd(server.access)
        keys = ClusterKeys("scale").job("job")
        spec = JobSpec(
            name="job",
            script="none.py",
            nodes=f"{max(1, count // 2)}:{count}",
            workers_per_node=1,
            join_wait_s=60.0,
        )
        etcd.put(keys.spec, encode(SpecRecord(spec=spec, submitted_wall_s=time.time(), submitted_by="benchmark")))
        fleet = Fleet(server.access, spec, Path(folder), count)
        try:
            return _measure(count, fleet, etcd, keys.generation)
        finally:
            fleet.close()
            etcd.close()


def _measure(count: int, fleet: Fleet, etcd: Etcd, key: str) -> Row:
    def revision() -> int:
        return etcd.get_prefix(key).revision

    before = revision()
    fleet.start(range(count))
    formed_s = fleet.wait(1, range(count), LIMIT_S)
    form_s = formed_s - max(fleet.ready_s(agent) for agent in range(count))
    form_writes = revision() - before
    fleet.settle()

    before, cpu_s, began_s = revision(), fleet.cpu_s(), time.monotonic()
    threading.Event().wait(STEADY_S)
    elapsed_s = time.monotonic() - began_s
    steady, cpu_s = (revision() - before) / elapsed_s, fleet.cpu_s() - cpu_s
    memory = fleet.memory_mb() / count

    before = revision()
    lost = count - 1
    reform_s = -fleet.lose([lost]) + fleet.wait(2, range(lost), LIMIT_S)
    reform_writes = revision() - before
    fleet.settle()
    before = revision()
    fleet.start([count])
    joined_s = fleet.wait(3, [*range(lost), count], LIMIT_S)
    join_s, join_writes = joined_s - fleet.ready_s(count), revision() - before
    fleet.settle()
    many = max(1, count // 100)
    left = [*range(lost - many), count]
    percent_s = -fleet.lose(list(range(lost - many, lost))) + fleet.wait(4, left, LIMIT_S)
    return Row(
        agents=count,
        form_s=round(form_s, 3),
        form_writes=form_writes,
        reform_s=round(reform_s, 3),
        reform_writes=reform_writes,
        percent_s=round(percent_s, 3),
        join_s=round(join_s, 3),
        join_writes=join_writes,
        steady_writes_per_s=round(steady, 2),
        cpu_ms_per_agent_s=round(1000 * cpu_s / elapsed_s / count, 2),
        memory_mb_per_agent=round(memory, 2),
    )


def torch_reform_s(count: int) -> float:
    """Torch's dynamic rendezvous over its c10d store: all `count` participants form again. Nobody's departure needs
    noticing, which stock torchrun cannot: this is its best case."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def handler() -> Any:
        store = TCPStore(
            "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        backend = C10dRendezvousBackend(store, f"run{count}")
        return DynamicRendezvousHandler.from_backend(
            f"run{count}", store, backend, count, count, local_addr="127.0.0.1"
        )

    handlers = [handler() for _ in range(count)]
    times = []
    for _ in range(2):
        began_s = time.monotonic()
        _all_at_once([h.next_rendezvous for h in handlers])
        times.append(time.monotonic() - began_s)
    for one in handlers:
        one._keep_alive_timer and one._keep_alive_timer.cancel()
    return times[-1]


def _all_at_once(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError(f"torch's rendezvous of {len(calls)} took over {LIMIT_S:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--max", type=int, default=1000, help="most agents")
    options = parser.parse_args()
    sizes = (8, 32, 64) if options.quick else tuple(n for n in SIZES if n <= options.max)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {psutil.virtual_memory().total >> 30} GiB", flush=True
    )
    rows = []
    for count in sizes:
        try:
            rows.append(measure(count))
        except TimeoutError as error:
            print(f"N = {count}: {error}", flush=True)
            break
        print(json.dumps(msgspec.to_builtins(rows[-1])), flush=True)
    torch = {}
    for count in (8, 32) if options.quick else TORCH_SIZES:
        try:
            torch[count] = round(torch_reform_s(count), 3)
        except TimeoutError as error:
            print(error)
            break
        print(json.dumps({"torch_agents": count, "torch_reform_s": torch[count]}), flush=True)
    last = rows[-1]
    ours = next((row.reform_s for row in rows if row.agents == 32), None)
    print(
        json.dumps(
            {
                "reform_s_at_max": last.reform_s,
                "agents_max": last.agents,
                "writes_per_reform_at_max": last.reform_writes,
                "torch_ratio_at_32": round(torch[32] / ours, 1) if ours and 32 in torch else None,
                "steady_writes_per_s_at_max": last.steady_writes_per_s,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
