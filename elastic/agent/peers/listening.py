"""Where the agent's own sockets listen: its port for other agents, and the store of each generation that it leads."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket

import structlog

log = structlog.get_logger()

BACKLOG = 1024
Ports = tuple[int, int]
"""First and last port of the range; (0, 0): any port."""
ANY: Ports = (0, 0)


def listen(address: str, ports: Ports = ANY) -> socket.socket:
    """A listening socket on `address` only, at a free port of `ports`.

    It listens on every address instead if `address` is a name, which other nodes may resolve to another address than
    this host does, or if this host does not have it (behind a NAT). It takes a port outside the range if none in it is
    free. Both are logged.
    """
    try:
        ipaddress.ip_address(address)
        return _in_range(address, ports)
    except ValueError:
        why = "it is a name: other nodes may know it by another address"
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            raise
        why = "this host does not have it"
    log.info("listen.every_address", address=address, why=why)
    return _in_range("", ports)


def _in_range(host: str, ports: Ports) -> socket.socket:
    first, last = ports
    for port in random.sample(range(first, last + 1), last - first + 1):
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    log.error("listen.no_free_port", first=first, last=last, why="a port outside `ports` is taken instead")
    return _bound(host, 0)


def _bound(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():  # every address of both families: a name may have either
        with contextlib.suppress(OSError):  # a network namespace may lack IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
