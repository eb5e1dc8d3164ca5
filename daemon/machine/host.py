"""Properties of this machine (name, address, GPUs), and the settings derived from them."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic.contract.keys import check_name
from elastic.contract.records.reasons import Code, Text, reason
from elastic.util.files import closed_after
from elasticd.base.config import check_socket
from elasticd.base.errors import InvalidConfig
from elasticd.base.settings import Settings

from . import addresses

CORES_PER_SLOT = 2
"""CPU cores per worker by default: torch's own threads make use of a second core."""

NVIDIA_DRIVER = "/dev/nvidiactl"
"""Exists once NVIDIA's driver is loaded."""

LEAST_FREE_MB = 50.0
"""Free space in the state directory below which a node accepts no new work."""


def complete(settings: Settings, gpus: tuple[int, ...]) -> Settings:
    """Fill in blank settings from the properties of this machine. Raises InvalidConfig, CannotStart."""
    node = settings.node or node_name(socket.gethostname())
    state_dir = state_dir_of(settings)
    run_dir = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    socket_path = os.path.abspath(settings.socket or os.path.join(run_dir or state_dir, "elasticd.sock"))
    check_socket(f"socket = {socket_path!r}", socket_path, InvalidConfig)
    own = addresses.find(settings)
    return msgspec.structs.replace(
        settings,
        node=check_name("node", node),
        state_dir=state_dir,
        socket=socket_path,
        address=own.address,
        interface=own.interface,
        slots=settings.slots if settings.slots != "auto" else len(gpus) or cpu_slots(),
    )


def state_dir_of(settings: Settings) -> str:
    """The state directory, absolute."""
    if given := settings.state_dir or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return os.path.abspath(given)
    if as_system_service():
        return "/var/lib/elasticd"
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
    return os.path.abspath(os.path.join(home, "elasticd"))


def node_name(hostname: str) -> str:
    """The part of a host name before the first dot, in characters that a key may have."""
    name = re.sub(r"[^a-z0-9_-]+", "-", hostname.partition(".")[0].lower()).strip("-_")[:63]
    return name.strip("-_") or "node"


def cpu_slots() -> int:
    """At least two, so that workers run together even on a small machine."""
    return max(2, len(os.sched_getaffinity(0)) // CORES_PER_SLOT)


@dataclass(frozen=True, slots=True)
class Gpus:
    indices: tuple[int, ...] = ()
    """NVML's indices."""
    problem: str = ""
    """Why existing GPUs cannot be seen; empty: no such problem."""


def gpus(setting: str = "auto") -> Gpus:
    """The GPUs that the driver shows; none without a driver, or if `setting` is 'none'. Of these only the ones in
    CUDA_VISIBLE_DEVICES, where elasticd has been started with it: the others belong to other programs, as with Slurm.
    """
    if setting == "none" or not os.path.exists(NVIDIA_DRIVER):
        return Gpus()
    fix = "and restart elasticd, or set gpus = 'none' to train on its CPU"
    try:
        import pynvml
    except ImportError:
        return Gpus(problem=f"GPUs cannot be seen: nvidia-ml-py is missing: pip install nvidia-ml-py {fix}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=f"GPUs cannot be seen: NVML: {error}: fix the driver {fix}")
    try:
        indices = tuple(range(pynvml.nvmlDeviceGetCount()))
        if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
            return Gpus(indices)
        ids = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in indices]
        return _visible(given, ids)
    except pynvml.NVMLError as error:
        return Gpus(problem=f"GPUs cannot be seen: NVML: {error}: fix the driver {fix}")
    finally:
        pynvml.nvmlShutdown()


def _visible(given: str, ids: Sequence[str]) -> Gpus:
    """The GPUs that `given`, a value of CUDA_VISIBLE_DEVICES, names by index or by the beginning of their id."""
    indices: list[int] = []
    for name in filter(None, map(str.strip, given.split(","))):
        matches = [index for index, uuid in enumerate(ids) if name == str(index) or uuid.startswith(name)]
        if name == "-1":  # CUDA's own word for the end of the list
            break
        if len(matches) != 1:
            fix = "name them by index or id, unset it, or set gpus = 'none' to train on its CPU"
            return Gpus(problem=f"CUDA_VISIBLE_DEVICES={given}: {name} is no GPU of this machine: {fix}")
        indices += matches
    return Gpus(tuple(dict.fromkeys(indices)))


@dataclass(frozen=True)
class StateFolder:
    """A health check (`elasticd.plugins`)."""

    folder: str
    every_s = 1.0
    leave = False

    def look(self) -> Text:
        try:
            with closed_after(os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
                disk = os.fstatvfs(folder)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return reason(Code.NO_DESCRIPTORS, who="elasticd" if error.errno == errno.EMFILE else "this machine")
            return reason(Code.STATE_DIR, str(error.strerror), folder=self.folder)
        free_mb = disk.f_bavail * disk.f_frsize / 1e6
        if free_mb < LEAST_FREE_MB:
            return reason(Code.DISK_FULL, folder=self.folder, free_mb=round(free_mb), least_mb=LEAST_FREE_MB)
        return ""


def as_system_service() -> bool:
    """Whether systemd's system manager started this very process."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) and os.geteuid() == 0


def uid_of(pid: int) -> int | None:
    """Real user id of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Uid:"))
    except OSError:
        return None
