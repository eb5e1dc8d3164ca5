"""The address and interface by which the other nodes reach this one."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from elasticd.base.config import host_port, is_loopback
from elasticd.base.errors import CannotStart, InvalidConfig
from elasticd.base.settings import Settings

DEFAULT_ROUTE = "192.0.2.1"
"""TEST-NET-1: an address that exists nowhere, so the route to it is the default route."""


@dataclass(frozen=True, slots=True)
class OwnAddress:
    address: str
    interface: str
    """The one that has the address; empty: none has, and gloo and NCCL choose one."""
    why: str
    """Origin of the address, for `elasticctl status`."""


def find(settings: Settings) -> OwnAddress:
    """The configured address and interface, else those that reach etcd. Raises InvalidConfig, CannotStart."""
    address, why = _address(settings)
    remote = not only_loopback(settings)
    if remote and is_loopback(address):
        raise InvalidConfig(
            f"address = {address!r} ({why}): no other node can reach it, but etcd at {', '.join(_ways(settings))} is "
            "not only on this machine; set `address` or `interface`, or leave both empty"
        )
    return OwnAddress(address, settings.interface or _interface(address, settings, remote), why)


def only_loopback(settings: Settings) -> bool:
    """Whether etcd is reached by Unix sockets and loopback only, so that all nodes of the cluster are on this
    machine."""
    return all(way.startswith("unix:") or is_loopback(_host(way)) for way in _ways(settings))


def _ways(settings: Settings) -> tuple[str, ...]:
    etcd = settings.etcd
    return etcd.endpoints or ((etcd.embedded_listen,) if etcd.embedded_listen else ())


def _host(way: str) -> str:
    return host_port("etcd.endpoints", way)[0]


def _address(settings: Settings) -> tuple[str, str]:
    if settings.address:
        return settings.address, "as set"
    if settings.interface:
        return interface_address(settings.interface), f"that of interface {settings.interface}"
    if only_loopback(settings):
        return "127.0.0.1", "etcd is on this machine"
    tried = []
    for way in _ways(settings):
        if way.startswith("unix:"):
            continue
        try:
            source = source_address(_host(way))
        except OSError as error:
            tried.append(f"{way}: {error.strerror or error}")
            continue
        if not is_loopback(source):
            return source, f"reaches etcd at {way}"
        tried.append(f"{way} is this machine")  # e.g. by a name that /etc/hosts maps to loopback
    try:
        return source_address(DEFAULT_ROUTE), "that of the default route"
    except OSError as error:
        tried.append(f"default route: {error.strerror or error}")
    raise CannotStart(f"no address by which other nodes reach this one ({'; '.join(tried)}): set `address`")


def source_address(host: str) -> str:
    """The local address from which this machine reaches `host`. Nothing is sent. Raises OSError."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str:
    """The IPv4 address of an interface, else its IPv6 one. Raises InvalidConfig."""
    import psutil

    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces.get(name, ()):
            if entry.family == family:
                return str(entry.address).partition("%")[0]
    what = "has no IP address" if name in interfaces else "does not exist"
    raise InvalidConfig(f"interface = {name!r}: {what} here; there are: {', '.join(sorted(interfaces))}")


def _interface(address: str, settings: Settings, remote: bool) -> str:
    """The interface that has `address`. By default gloo uses the interface of the address that this host's own name
    resolves to, which is 127.0.1.1 on Debian, and NCCL the first in its own order."""
    if not remote and is_loopback(address):
        return "lo"
    candidates = [address]
    with contextlib.suppress(OSError):  # a name that only other nodes can resolve
        candidates += [str(entry[4][0]) for entry in socket.getaddrinfo(address, None)]
    for way in (*_ways(settings), DEFAULT_ROUTE):  # behind a NAT no interface has the address: then the one to etcd
        with contextlib.suppress(OSError, ValueError):
            candidates.append(source_address(way if way == DEFAULT_ROUTE else _host(way)))
    for candidate in candidates:
        if (name := interface_with(candidate)) and not is_loopback(candidate):
            return name
    return ""


def interface_with(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(str(entry.address).partition("%")[0] == address for entry in entries):
            return name
    return ""
