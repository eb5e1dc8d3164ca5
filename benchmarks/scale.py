"""How the control plane scales: simulated agents (the real loop, etcd_writer and recovery, a real etcd, no workers).

    python benchmarks/scale.py [--quick] [--max N] [--only N] [--costs]

For N = 8 … as many as asked: first forming, re-forming after one agent was lost (the median of three such losses, one
after the other), a join, and re-forming after 1 % were lost at once; each until every agent holds a generation of just
those who are there. All N agents and etcd share this one machine's cores, so the times contain the CPU of N nodes; the
counts of writes do not. Torch's dynamic rendezvous is driven beside it.

Last line: {"reform_s_at_max", "agents_max", "writes_per_reform_at_max", "torch_ratio_at_32",
"steady_writes_per_s_at_max", "rows": {agents: each figure of the row}, "torch_reform_s": {agents: seconds}}.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import _scale_costs  # noqa: E402
import msgspec  # noqa: E402
import psutil  # noqa: E402
from _harness import SMOKE  # noqa: E402
from _scale_agents import STEP_S, TIMEOUTS, Fleet  # noqa: E402
from support.etcd_server import EtcdServer  # noqa: E402

from elastic.contract.job.spec import JobSpec  # noqa: E402
from elastic.contract.keys import ClusterKeys, JobKeys  # noqa: E402
from elastic.contract.records.job_records import SpecRecord, encode  # noqa: E402
from elastic.etcd.client import KV, Etcd, EtcdError  # noqa: E402
from elastic.recovery.machine.model import LARGE_JOB_NODES  # noqa: E402

SIZES = (8, 32, 256, 500)
TORCH_SIZES = (8, 16, 32, 64)
STEADY_S = 6.0
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where the agents' folders are: a thousand of them would wait for one disk."""
LOSSES = 3
"""One after the other, where as many can be spared: a machine that others share is twice as slow at one moment as at
the next."""
FORM_LIMIT_S = 100.0
LIMIT_S = 60.0


class Row(msgspec.Struct):
    """Per size. Seconds; writes by the kind of key, from the change until it has settled."""

    agents: int
    form_s: float
    """From when the last agent was there."""
    reform_s: float
    """The median of `reforms_s`; the writes and what etcd sent are those of this loss."""
    reforms_s: list[float]
    join_s: float
    percent_s: float
    form_writes: dict[str, int]
    reform_writes: dict[str, int]
    join_writes: dict[str, int]
    percent_writes: dict[str, int]
    steady_writes_per_s: float
    renewals_per_s: float
    cpu_ms_per_agent_s: float
    """In steady state."""
    etcd_cpu_ms_per_s: float
    memory_mb_per_agent: float
    threads_per_agent: float
    etcd_memory_mb: float
    etcd_sent_mb_per_reform: float


class Ledger:
    """Every write below a job's keys, by kind, as etcd's watch tells it."""

    def __init__(self, etcd: Etcd, keys: JobKeys) -> None:
        self._root = keys.root
        self._counts: collections.Counter[str] = collections.Counter()
        start = etcd.get_prefix(keys.generation).revision + 1
        self._stream = etcd.events(keys.root, start)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EtcdError):
            for batch in self._stream:
                for change in batch.changes:
                    key = change.key if isinstance(change, KV) else change[0]
                    kind = key.removeprefix(self._root).removeprefix("head/").partition("/")[0]
                    self._counts[kind if isinstance(change, KV) else f"{kind} gone"] += 1

    def close(self) -> None:
        self._stream.cancel()

    @contextlib.contextmanager
    def page(self) -> Iterator[dict[str, int]]:
        """What is written meanwhile, filled in at the end."""
        before, page = self._counts.copy(), dict[str, int]()
        yield page
        page.update(self._counts - before)


def asked_for(writes: dict[str, int]) -> int:
    """Without what is written all the time, the leader's progress and the agents' accounts of their ranks, and without
    what etcd deletes when a lease ends."""
    return sum(n for kind, n in writes.items() if kind not in ("progress", "ranks") and not kind.endswith(" gone"))


class Meter:
    """etcd's own counters."""

    def __init__(self, server: EtcdServer) -> None:
        self._url = f"http://{server.endpoint}/metrics"

    def read(self) -> dict[str, float]:
        with urllib.request.urlopen(self._url, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        renewed = next((v for k, v in found.items() if k.startswith(RENEWED) and '"LeaseKeepAlive"' in k), "0")
        return {
            "renewals": float(renewed),
            "cpu_s": float(found["process_cpu_seconds_total"]),
            "memory_mb": float(found["process_resident_memory_bytes"]) / 1e6,
            "sent_mb": float(found["etcd_network_client_grpc_sent_bytes_total"]) / 1e6,
        }


RENEWED = "grpc_server_msg_received_total{"


def measure(count: int) -> Row:
    """One size, on an etcd of its own."""
    with (
        EtcdServer(args=["--quota-backend-bytes", str(2**31)]) as server,
        tempfile.TemporaryDirectory(prefix="elt-scale-", dir=IN_MEMORY) as folder,
    ):
        etcd = Etcd(server.access, call_s=10.0)
        keys = ClusterKeys("scale").job("job")
        spec = JobSpec(
            name="job",
            script="none.py",
            nodes=f"{max(1, count // 2)}:{count}",
            workers_per_node=1,
            join_wait_s=FORM_LIMIT_S,
        )
        etcd.put(keys.spec, encode(SpecRecord(spec=spec, submitted_wall_s=time.time(), submitted_by="benchmark")))
        ledger = Ledger(etcd, keys)
        fleet = Fleet(server.access, spec, Path(folder), count)
        try:
            return _measure(count, fleet, ledger, Meter(server))
        finally:
            fleet.close()
            ledger.close()
            etcd.close()


def _measure(count: int, fleet: Fleet, ledger: Ledger, meter: Meter) -> Row:
    # In a large job most turn to its head when they next look around.
    settle_s = 2.5 + count / 100 + (1.5 * STEP_S if count > LARGE_JOB_NODES else 0.0)
    with ledger.page() as form_writes:
        fleet.start(range(count))
        form_s = fleet.wait(1, range(count), FORM_LIMIT_S) - max(fleet.ready_s(agent) for agent in range(count))
        pause(settle_s)
    say(f"{count} agents formed after {form_s:.3f} s, {fleet.threads()} threads")

    with ledger.page() as steady_writes:
        etcd_before, cpu_before_s, began_s = meter.read(), fleet.cpu_s(), time.monotonic()
        pause(STEADY_S)
        etcd_after, cpu_s = meter.read(), fleet.cpu_s() - cpu_before_s
        elapsed_s = time.monotonic() - began_s
    memory_mb, threads = fleet.memory_mb() / count, fleet.threads() / count

    left, many, generation = count, max(1, count // 100), 1
    losses: list[tuple[float, float, dict[str, int]]] = []
    for _ in range(min(LOSSES, max(1, count // 8))):
        left, generation = left - 1, generation + 1
        sent_before_mb = meter.read()["sent_mb"]
        with ledger.page() as writes:
            lost_s = -fleet.lose([left]) + fleet.wait(generation, range(left), LIMIT_S)
            losses.append((lost_s, meter.read()["sent_mb"] - sent_before_mb, writes))
            pause(settle_s)
        say(f"re-formed after {lost_s:.3f} s")
    reform_s, sent_mb, reform_writes = sorted(losses, key=lambda loss: loss[0])[len(losses) // 2]
    with ledger.page() as join_writes:
        fleet.start([count])
        join_s = fleet.wait(generation + 1, [*range(left), count], LIMIT_S) - fleet.ready_s(count)
        pause(settle_s)
    with ledger.page() as percent_writes:
        gone_s = fleet.lose(list(range(left - many, left)))
        percent_s = fleet.wait(generation + 2, [*range(left - many), count], LIMIT_S) - gone_s
        pause(settle_s)

    def per_s(name: str) -> float:
        return (etcd_after[name] - etcd_before[name]) / elapsed_s

    return Row(
        agents=count,
        form_s=round(form_s, 3),
        reform_s=round(reform_s, 3),
        reforms_s=[round(seconds, 3) for seconds, _, _ in losses],
        join_s=round(join_s, 3),
        percent_s=round(percent_s, 3),
        form_writes=form_writes,
        reform_writes=reform_writes,
        join_writes=join_writes,
        percent_writes=percent_writes,
        steady_writes_per_s=round(sum(steady_writes.values()) / elapsed_s, 2),
        renewals_per_s=round(per_s("renewals"), 1),
        cpu_ms_per_agent_s=round(1000 * cpu_s / elapsed_s / count, 2),
        etcd_cpu_ms_per_s=round(1000 * per_s("cpu_s"), 1),
        memory_mb_per_agent=round(memory_mb, 2),
        threads_per_agent=round(threads, 1),
        etcd_memory_mb=round(etcd_after["memory_mb"], 1),
        etcd_sent_mb_per_reform=round(sent_mb, 2),
    )


def pause(seconds: float) -> None:
    """Until the generation has stepped, so that the next change can be measured alone."""
    threading.Event().wait(seconds)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def torch_reform_s(count: int) -> float:
    """Torch's dynamic rendezvous over its c10d store: all `count` participants form again. No departure needs
    noticing, which stock torchrun cannot: this is its best case."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch._C._distributed_c10d import TCPStore
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
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    parser.add_argument("--max", type=int, default=1000, help="most agents")
    parser.add_argument("--only", type=int, help="one size, and no torch")
    parser.add_argument("--costs", action="store_true", help="only what one agent has to do at 1,000 and 10,000 nodes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that etcd and its data go, too
    if options.costs:
        for nodes in (1000, 10000):
            print(json.dumps(msgspec.to_builtins(_scale_costs.measure(nodes))), flush=True)
        return 0
    sizes: Sequence[int] = [n for n in SIZES if n < options.max] + [options.max]
    torch_sizes: Sequence[int] = TORCH_SIZES
    if options.quick:
        sizes, torch_sizes = (8, 32, 64), (8, 32)
    if options.smoke:
        sizes, torch_sizes = (4,), (2,)
    if options.only:
        sizes, torch_sizes = (options.only,), ()
    memory = psutil.virtual_memory().total >> 30
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {memory} GiB; leases of {TIMEOUTS.lease_ttl_s:g} s",
        flush=True,
    )
    rows = []
    for count in sizes:
        try:
            rows.append(measure(count))
        except (TimeoutError, RuntimeError) as error:
            print(f"N = {count}: {error}", flush=True)
            break
        print(json.dumps(msgspec.to_builtins(rows[-1])), flush=True)
    torch: dict[int, float] = {}
    for count in torch_sizes:
        try:
            torch[count] = round(torch_reform_s(count), 3)
        except TimeoutError as error:
            print(error, flush=True)
            break
        print(json.dumps({"torch_agents": count, "torch_reform_s": torch[count]}), flush=True)
    if not rows:
        return 1
    last = rows[-1]
    ours = next((row.reform_s for row in rows if row.agents == 32), None)
    print(
        json.dumps(
            {
                "reform_s_at_max": last.reform_s,
                "agents_max": last.agents,
                "writes_per_reform_at_max": asked_for(last.reform_writes),
                "torch_ratio_at_32": round(torch[32] / ours, 1) if ours and 32 in torch else None,
                "steady_writes_per_s_at_max": last.steady_writes_per_s,
                "rows": {str(row.agents): msgspec.to_builtins(row) for row in rows},
                "torch_reform_s": {str(agents): seconds for agents, seconds in torch.items()},
            }
        ),
        flush=True,
    )
    # Torch's keep-alive threads may hang on its store: nothing is left to wait for.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
