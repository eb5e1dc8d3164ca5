"""Real elasticd processes, with agents that are stand-ins unless a test wants real ones."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from . import procs, scratch
from .api import call
from .wait import eventually

FAKE_AGENT = pathlib.Path(__file__).with_name("fake_agent.py")
ELASTICD = (sys.executable, "-m", "elasticd.main")
ELASTICCTL = (sys.executable, "-c", "from elasticd.ctl.main import main; main()")


class Node:
    """One elasticd with a folder of its own. Its agents and its embedded etcd carry the tag of `procs`."""

    def __init__(self, started: procs.Procs, folder: pathlib.Path, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.folder = folder / name
        self.state = self.folder / "state"
        self.state.mkdir(parents=True)
        self.socket = self.state / "elasticd.sock"
        self.log = self.folder / "elasticd.base.log"
        self._started = started
        self._settings = {"node": name, "state_dir": str(self.state), "slots": 2, "http.listen": "127.0.0.1:0",
                          "etcd.insecure": "true", "timeouts.lease_ttl_s": 3.0,
                          "timeouts.lease_renew_s": 0.8} | settings  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def start(self, wait_s: float = 20.0, env: dict[str, str] | None = None) -> Self:
        argv = list(ELASTICD)
        for key, value in self._settings.items():
            argv += ["--set", f"{key}={value}"]
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            self.process = self._started.popen(argv, stdout=log, stderr=log, env=env)
        if wait_s:
            eventually(self.ready, wait_s, f"elasticd {self.name} is ready; see {self.log}")
            self.ready_s = time.monotonic() - began_s
        return self

    def ready(self) -> bool:
        assert self.process is not None
        if (code := self.process.poll()) is not None:
            raise RuntimeError(f"elasticd {self.name} ended with {code}:\n{self.log.read_text()[-3000:]}")
        try:
            return not self.get("/v1/status")["problems"]
        except OSError:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End the daemon alone; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def get(self, path: str) -> dict[str, Any]:
        return call(self.socket, "GET", path)

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        return call(self.socket, "POST", path, body or {})

    def job(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/jobs/{name}")

    def submit(self, name: str, fake: dict[str, Any] | None = None, **fields: Any) -> None:
        """Submit a job whose agent is a stand-in that does what `fake` says."""
        if fake is not None:
            (self.state / "fake.json").write_text(json.dumps(fake))
        self.post("/v1/jobs", {"name": name, "script": "/t.py", "workdir": "/", "python": str(FAKE_AGENT)} | fields)

    def agent_pid(self, job: str) -> int:
        """Of the agent that the daemon knows; fails while there is none."""
        agent = self.job(job)["agent"]
        assert agent, f"no agent for {job}"
        assert agent["pid"], agent
        assert agent["phase"] != "starting", agent
        return int(agent["pid"])

    def etcd_pid(self) -> int:
        text = (self.state / "etcd" / "lock").read_text()
        assert text.isdigit(), "it is just being written"
        return int(text)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def ctl(self, *args: str, timeout_s: float = 30.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run elasticctl against this daemon."""
        argv = [*ELASTICCTL, "--socket", str(self.socket), *args]
        options.setdefault("env", self._started.env())
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


class Nodes:
    """`with Nodes() as nodes: nodes.add("a")`. Everything is ended, by its id, and removed when the block is left."""

    def __init__(self) -> None:
        self._procs = procs.Procs()
        self.folder = pathlib.Path(scratch.folder("daemons", "/tmp"))

    def add(self, name: str, *, start: bool = True, **settings: Any) -> Node:
        """A daemon; settings as etcd__endpoints="host:port"."""
        flat = {key.replace("__", "."): value for key, value in settings.items()}
        node = Node(self._procs, self.folder, name, flat)
        return node.start() if start else node

    def pids(self) -> list[int]:
        return self._procs.pids()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for log in self.folder.glob("*/elasticd.base.log"):
                print(f"== {log}\n{log.read_text()[-4000:]}", file=sys.stderr)
        self._procs.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def rss_mb(pid: int) -> float:
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
