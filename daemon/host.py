"""What this machine says of itself: its name, its address, its GPUs; and with that the settings left blank."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path

import msgspec

from elastic.core.keys import check_name

from .config import MAX_SOCKET_PATH, host_port
from .errors import BadConfig
from .settings import Settings

CORES_PER_SLOT = 2
"""A CPU worker's share when nothing is said: torch's own threads make use of a second core."""

LEAST_FREE_MB = 50.0
"""Free space in the state directory below which a node takes no new work."""


def complete(settings: Settings, gpus: tuple[int, ...]) -> Settings:
    """Fill in what was left blank from what this machine says of itself. Raises BadConfig."""
    node = settings.node or node_name(socket.gethostname())
    state_dir = os.path.abspath(settings.state_dir or default_state_dir())
    run_dir = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    socket_path = os.path.abspath(settings.socket or os.path.join(run_dir or state_dir, "elasticd.sock"))
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH:
        raise BadConfig(f"socket = {socket_path!r}: longer than the {MAX_SOCKET_PATH} bytes a Unix socket may have")
    address = settings.address or _address(settings)
    return msgspec.structs.replace(
        settings,
        node=check_name("node", node),
        state_dir=state_dir,
        socket=socket_path,
        address=address,
        interface=settings.interface or ("lo" if is_loopback(address) else ""),
        slots=settings.slots if settings.slots != "auto" else len(gpus) or cpu_slots(),
    )


def node_name(hostname: str) -> str:
    """The part of a host name before the first dot, in characters that a key may have."""
    name = re.sub(r"[^a-z0-9_-]+", "-", hostname.partition(".")[0].lower()).strip("-_")[:63]
    return name.strip("-_") or "node"


def cpu_slots() -> int:
    """At least two: also on a small machine people want to see workers work together."""
    return max(2, len(os.sched_getaffinity(0)) // CORES_PER_SLOT)


def gpus() -> tuple[int, ...]:
    """Indices of the GPUs that the driver shows; empty without a driver or without nvidia-ml-py."""
    if not os.path.exists("/dev/nvidiactl"):
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def sickness(state_dir: str) -> str:
    """Why this machine should take no work; empty: it may."""
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            whose = "elasticd" if error.errno == errno.EMFILE else "this machine"
            return f"{whose} has no file descriptors left: no agent can be started here"
        return f"state_dir {state_dir}: {error.strerror}"
    try:
        disk = os.fstatvfs(folder)
    except OSError as error:
        return f"state_dir {state_dir}: {error.strerror}"
    finally:
        os.close(folder)
    free_mb = disk.f_bavail * disk.f_frsize / 1e6
    if free_mb < LEAST_FREE_MB:
        return f"state_dir {state_dir} has {free_mb:.0f} MB left, {LEAST_FREE_MB:g} MB are needed for logs and state"
    return ""


def as_system_service() -> bool:
    """Whether systemd's system manager started this very process."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) and os.geteuid() == 0


def default_state_dir() -> str:
    if given := os.environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return given
    if as_system_service():
        return "/var/lib/elasticd"
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
    return os.path.join(home, "elasticd")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def only_loopback(settings: Settings) -> bool:
    """Whether every way to etcd is loopback, so that all nodes of the cluster are on this machine."""
    ways = settings.etcd.endpoints or (settings.etcd.embedded_listen,)
    return all(is_loopback(host_port("etcd.endpoints", way, zero_ok=True)[0]) for way in ways)


def _address(settings: Settings) -> str:
    if settings.interface:
        return interface_address(settings.interface)
    return "127.0.0.1" if only_loopback(settings) else route_address()


def interface_address(name: str) -> str:
    """The IPv4 address of an interface, else its IPv6 one. Raises BadConfig."""
    import psutil

    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known.get(name, ()):
            if entry.family == family:
                return str(entry.address).partition("%")[0]
    what = "has no IP address" if name in known else "does not exist"
    raise BadConfig(f"interface = {name!r}: {what} here; there are: {', '.join(sorted(known))}")


def route_address() -> str:
    """The address this machine has towards the default route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: a place that exists nowhere
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
