"""The parts of a running daemon, assembled: etcd, loop, agents, API, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from elastic.core.agentfile import EtcdAccess
from elastic.core.keys import ClusterKeys
from elastic.etcd import Etcd

from . import api
from .actions import Actions
from .agents import Agents
from .event_queue import EventQueue, Stop
from .gpus import Health
from .host import Gpus
from .httpd import Server
from .launch import Launcher
from .log import Log
from .loop import Loop
from .members import Members
from .notify import Notify
from .published_state import PublishedState
from .routes import Service
from .settings import Settings
from .threads import Threads, fail_stop
from .views import Identity, Json
from .writer import Writer


class Daemon:
    """Constructed by `main`; `run` blocks until `stop`."""

    def __init__(
        self,
        settings: Settings,
        access: EtcdAccess,
        identity: Identity,
        gpus: Gpus,
        describe: Callable[[], Json],
        launcher: Launcher,
        threads: Threads,
        notify: Notify,
        log: Log,
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._log = log
        self._mailbox = EventQueue()
        self._board = PublishedState()
        self._etcd = Etcd(access, call_s=settings.timeouts.etcd_call_s)
        self._keys = ClusterKeys(settings.cluster)
        self._writer = Writer(self._etcd, self._keys, self._mailbox, log)
        self._members = Members(self._etcd, self._writer.show_members, log)
        self._agents = Agents(Path(settings.state_dir), launcher, threads, self._mailbox.post, log)
        self._health = Health(gpus.indices, log, self_test=settings.gpu_self_test, problem=gpus.problem)
        self._loop = Loop(
            settings, access, gpus.indices, self._mailbox, self._writer, self._agents, self._board, notify, log,
            self._health,
        )  # fmt: skip
        self._identity = identity
        self._describe = describe

    def run(self) -> int:
        """Serve and run the loop until stopped. Returns the exit code."""
        self._serve()
        self._threads.start("writer", self._writer.run)
        self._threads.start("gpus", self._health.run)
        if not self._identity.embedded:
            self._threads.start("etcd-members", self._members.run)
        self._etcd.watch(self._keys.root, self._mailbox.show)
        try:
            stop = self._loop.run()
        except Exception:  # the second of the two places: a failed loop must not appear alive
            fail_stop(self._log, "loop")
            raise
        (self._log.error if stop.code else self._log.info)("daemon.stopping", why=stop.why, code=stop.code)
        return stop.code

    def stop(self, why: str) -> None:
        """Called from a signal handler."""
        self._mailbox.post(Stop(why))

    def close(self) -> None:
        """Leave the cluster; agents and the embedded etcd continue to run."""
        # The servers end with the process: stopping them first would only cost the time of their polls.
        Path(self._settings.socket).unlink(missing_ok=True)
        self._health.stop()
        self._members.close()
        self._loop.leave()
        self._etcd.close()

    def _serve(self) -> None:
        settings, identity = self._settings, self._identity
        if settings.http.listen:
            holder: list[Callable[[], bytes]] = []

            def exposition() -> bytes:
                if not holder:  # prometheus-client is imported at the first scrape: readiness does not need it
                    from . import metrics

                    holder.append(metrics.exposition(lambda: self._board.now, self._identity))
                return holder[0]()

            server = api.metrics_server(settings.http.listen, self._board, exposition, self._log)
            host, port = server.listener.getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            identity = dataclasses.replace(identity, metrics=f"http://{where}")
            self._identity = identity
            self._add("metrics", server)
        actions = Actions(self._etcd, self._keys, self._board)
        service = Service(self._board, actions, identity, self._agents.logs, self._describe, self._log)
        self._add("api", api.unix_server(settings.socket, settings.socket_group, service))
        self._log.info("api.listening", socket=settings.socket, metrics=identity.metrics)

    def _add(self, name: str, server: Server) -> None:
        self._threads.start(name, server.serve)
