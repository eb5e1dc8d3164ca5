#!/usr/bin/env python3
"""Stands in for an agent in tests of the daemon: holds the lock, reports, obeys orders. No torch, no etcd.

Run as the job's "python": `fake_agent.py -m elastic.agent <agent_dir>`. The job's environment and arguments do not
reach it; what it shall do stands in <agent_dir>/../../../fake.json, if there is one:
{"exit_after_s": 0.1, "exit_code": 3, "deaf": true, "silent": true}
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import signal
import sys
import threading
import time

agent_dir = pathlib.Path(sys.argv[-1])
config = json.loads((agent_dir / "config.json").read_text())
try:
    plan = json.loads((agent_dir.parent.parent.parent / "fake.json").read_text())
except FileNotFoundError:
    plan = {}

lock = open(agent_dir / "lock", "a+b")  # noqa: SIM115 - held until we end
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

wake = threading.Event()
hups = 0


def on_hup(*_: object) -> None:
    global hups
    hups += 1
    wake.set()


signal.signal(signal.SIGHUP, on_hup)
if plan.get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
began_s = time.monotonic()


def report(step: int) -> None:
    row = {"rank": 0, "node": config["node"], "slot": 0, "pid": os.getpid(), "phase": "running", "step": step,
           "incarnation": 0}  # fmt: skip
    progress = {"generation": 1, "world_size": 1, "step": step, "steps_per_s": 5.0, "loss": 0.5, "wall_s": time.time()}
    status = {
        "pid": os.getpid(), "incarnation": f"fake-{os.getpid()}", "job": config["job"], "node": config["node"],
        "phase": "running", "reason": f"hups={hups}", "leader": True, "generation": 1, "etcd_ok": True,
        "written_wall_s": time.time(), "ranks": [row], "progress": progress,
    }  # fmt: skip
    aside = agent_dir / ".status.new"
    aside.write_text(json.dumps(status))
    os.replace(aside, agent_dir / "status.json")


with open(pathlib.Path(config["logs_dir"]) / f"slot0.fake{os.getpid()}.0001.log", "a", buffering=1) as log:
    step = 0
    while True:
        step += 1
        if not plan.get("silent"):
            report(step)
        log.write(f"step {step}\n")
        if "exit_after_s" in plan and time.monotonic() - began_s > plan["exit_after_s"]:
            print("fake agent: as planned", file=sys.stderr)
            sys.exit(plan.get("exit_code", 1))
        try:
            orders = json.loads((agent_dir / "orders.json").read_text())
        except (FileNotFoundError, ValueError):
            orders = {}
        if orders.get("draining") and not plan.get("deaf"):
            sys.exit(0)
        wake.wait(0.1)
        wake.clear()
