"""elasticd, whose agents are forked by the forge that listens at ELASTIC_TEST_FORGE instead of started anew; all else
is the daemon as it is."""

from __future__ import annotations

import os
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).parents[1])

from support import warm  # noqa: E402

from elasticd import main  # noqa: E402
from elasticd.machine.processes import launch  # noqa: E402

_detached = launch.Detached.start


def _start(self: launch.Detached, service: launch.ServiceProcess) -> launch.Started:
    if list(service.argv[:3]) != [sys.executable, "-m", "elastic.agent"]:
        return _detached(self, service)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(service.output, flags, 0o640), "ab") as log:
            child = warm.start(os.environ[warm.SOCKET_ENV], service.argv[1:], service.env, str(service.cwd), log)
    except OSError as error:
        raise launch.CannotStart(f"{service.argv[0]}: {error.strerror} (to run {service.name})") from error
    return launch.Started(child.pid, child)  # type: ignore[arg-type]


if __name__ == "__main__":
    launch.Detached.start = _start  # type: ignore[method-assign]
    sys.exit(main.main())
