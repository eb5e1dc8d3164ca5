"""Finds in /proc which of this process's sockets belong to a process group, and shuts them.

Gloo has no way to interrupt a collective, but a socket that is shut raises an error in any thread that waits for it.
Gloo's sockets are distinguished from the user's own by a property that only gloo has: it registers them, by pointer and
not by number, in an epoll instance together with the TCP socket it listens on and the pipe that wakes its loop. So
connections opened late, and those of groups made with ``new_group``, are found as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

_FDS = "/proc/self/fd"
_ESTABLISHED = 1
"""TCP_ESTABLISHED of tcp_states.h."""
_ENTRY = re.compile(r"^tfd:\s*(\d+)\s+events:\s*[0-9a-f]+\s+data:\s*([0-9a-f]+)", re.MULTILINE)


class Sock(NamedTuple):
    fd: int
    inode: int
    """Distinguishes a socket from a later one with the same descriptor."""


def gloo_sockets() -> list[Sock]:
    """The connected (or connecting) sockets of every gloo group in this process; never a listening one."""
    result: list[Sock] = []
    for members in _gloo_epolls():
        connected = [sock for sock in members if not _listens(sock)]
        result += connected if len(connected) < len(members) else []
    return result


def gloo_listeners() -> list[Sock]:
    """The sockets that gloo groups listen on: shutting one ends the process."""
    return [sock for members in _gloo_epolls() for sock in members if _listens(sock)]


def _gloo_epolls() -> list[list[Sock]]:
    found = links()
    return [_epoll_sockets(fd, found) for fd, link in found.items() if link == "anon_inode:[eventpoll]"]


def listening_at() -> list[tuple[str, socket.AddressFamily]]:
    """The addresses on which gloo groups listen: those of the interface that was chosen for them."""
    handles = (handle for sock in gloo_listeners() for handle in _open(sock))
    return list(dict.fromkeys((handle.getsockname()[0], handle.family) for handle in handles))


def unknown_interface(environment: Mapping[str, str], names: Collection[str]) -> str:
    """'VARIABLE=NAME' of an interface for gloo or NCCL that is not among `names`, those of this host; '' if there is
    none. NCCL takes the beginnings of names, exact ones after '=', and excludes those after '^'."""
    for name in filter(None, environment.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in names:
            return f"GLOO_SOCKET_IFNAME={name}"
    given = environment.get("NCCL_SOCKET_IFNAME", "")
    wanted = [] if given.startswith("^") else [part for part in given.removeprefix("=").split(",") if part]
    exact = given.startswith("=")
    if wanted and not any(name == part if exact else name.startswith(part) for name in names for part in wanted):
        return f"NCCL_SOCKET_IFNAME={given}"
    return ""


def tcp_sockets() -> list[Sock]:
    """Every TCP socket of this process."""
    return [sock for sock in _sockets() if any(True for _ in _open(sock))]


def sockets_to(addresses: Collection[tuple[str, int]]) -> list[Sock]:
    """The TCP sockets connected to one of `addresses` (numeric host, port): the store's clients."""
    return [sock for sock in _sockets() if _peer(sock) in addresses] if addresses else []


def cut(sock: Sock, how: int = socket.SHUT_RDWR) -> None:
    """Shut `sock` down, by default in both directions: threads that wait for it, here or at the other end, get an error
    at once. Nothing if it is not connected, or gone."""
    for handle in _open(sock):
        with contextlib.suppress(OSError):
            handle.shutdown(how)


def is_whole(sock: Sock) -> bool:
    """Whether its connection stands: neither end has closed it."""
    return any(handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED for handle in _open(sock))


def links() -> dict[int, str]:
    """Descriptor -> what it refers to, of all that this process has open."""
    found = {}
    for name in os.listdir(_FDS):
        try:
            found[int(name)] = os.readlink(f"{_FDS}/{name}")
        except OSError:
            pass  # closed since it was listed, as the descriptor of the listing itself always is
    return found


def _epoll_sockets(epoll_fd: int, open_files: dict[int, str]) -> list[Sock]:
    """The sockets in an epoll instance of gloo's kind; none for any other."""
    try:
        with open(f"/proc/self/fdinfo/{epoll_fd}") as info:
            entries = [(int(fd), int(data, 16)) for fd, data in _ENTRY.findall(info.read())]
    except OSError:
        return []
    piped = any(open_files.get(fd, "").startswith("pipe:") for fd, _ in entries)
    if not piped or any(fd == data for fd, data in entries):
        return []
    return [sock for fd, _ in entries if (sock := _as_socket(fd, open_files.get(fd, "")))]


def _sockets() -> list[Sock]:
    return [sock for fd, link in links().items() if (sock := _as_socket(fd, link))]


def _as_socket(fd: int, link: str) -> Sock | None:
    return Sock(fd, int(link[8:-1])) if link.startswith("socket:[") else None


def _listens(sock: Sock) -> bool:
    for handle in _open(sock):
        return bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _peer(sock: Sock) -> tuple[str, int] | None:
    for handle in _open(sock):
        try:
            host, port = handle.getpeername()[:2]
        except OSError:
            return None
        return host.removeprefix("::ffff:"), port
    return None


def _open(sock: Sock) -> Iterator[socket.socket]:
    """A TCP socket object on a duplicate of the descriptor, closed afterwards; yields nothing if it is another
    socket."""
    try:
        copy = os.dup(sock.fd)
    except OSError:
        return
    try:
        if os.fstat(copy).st_ino != sock.inode:
            return
        handle = socket.socket(fileno=copy)
    except OSError:
        return
    else:
        copy = -1
        with handle:
            if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                yield handle
    finally:
        if copy >= 0:
            os.close(copy)
