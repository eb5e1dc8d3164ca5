"""elasticd, whose agents are forked by the forge that listens at ELASTIC_TEST_FORGE instead of started anew; all else
is the daemon as it is."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

sys.path[0] = str(pathlib.Path(__file__).parents[1])

from support import warm  # noqa: E402

from elasticd import launch, main  # noqa: E402

_detached = launch.Detached.start


def _start(
    self: launch.Detached,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: pathlib.Path,
    output: pathlib.Path,
    properties: Sequence[str] = (),
) -> launch.Started:
    if list(argv[:3]) != [sys.executable, "-m", "elastic.agent"]:
        return _detached(self, name, argv, env, cwd, output, properties)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(output, flags, 0o640), "ab") as log:
            child = warm.start(os.environ[warm.SOCKET_ENV], argv[1:], env, str(cwd), log)
    except OSError as error:
        raise launch.CannotStart(f"{argv[0]}: {error.strerror} (to run {name})") from error
    return launch.Started(child.pid, child)  # type: ignore[arg-type]


if __name__ == "__main__":
    launch.Detached.start = _start  # type: ignore[method-assign]
    sys.exit(main.main())
