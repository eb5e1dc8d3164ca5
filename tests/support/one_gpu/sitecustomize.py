"""A machine with one GPU, for every Python process that has this folder in PYTHONPATH: NVML is a stand-in.

What the card does is told by files in $ONE_GPU, for the node that $ELASTIC_TESTING_NODE names:

    xid.NODE        a number: the driver reports this XID, once
    held.NODE       process ids that have memory on the card, as long as it is there
    selftest.NODE   what the self-test finds
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import types
from typing import Any

FOLDER, NODE = pathlib.Path(os.environ["ONE_GPU"]), os.environ.get("ELASTIC_TESTING_NODE", "")
sys.path.append(str(pathlib.Path(__file__).parents[2]))

from support.fake_nvml import FakeNvml, NVMLError_Timeout  # noqa: E402 - the path is set up above


class OneGpu(FakeNvml):
    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        try:
            held = (FOLDER / f"held.{NODE}").read_text().split()
        except FileNotFoundError:
            held = []
        return [types.SimpleNamespace(pid=int(pid), usedGpuMemory=1 << 30) for pid in held]

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        end_s, order = time.monotonic() + timeout_ms / 1000, FOLDER / f"xid.{NODE}"
        while time.monotonic() < end_s:
            if order.exists():
                xid = int(order.read_text())
                order.unlink()
                return types.SimpleNamespace(device=0, eventType=self.nvmlEventTypeXidCriticalError, eventData=xid)
            time.sleep(0.02)
        raise NVMLError_Timeout


sys.modules["pynvml"] = OneGpu()
_exists = os.path.exists
os.path.exists = lambda path: path == "/dev/nvidiactl" or _exists(path)  # type: ignore[assignment]
if "elastic.agent.workers.gpu_selftest" in sys.orig_argv and (FOLDER / f"selftest.{NODE}").exists():
    print(json.dumps({"tested": ["cuda:0"], "problem": (FOLDER / f"selftest.{NODE}").read_text()}), flush=True)
    os._exit(1)
