"""Every timeout of the system, in one place, with the relations that must hold between them."""

from __future__ import annotations

import msgspec

QUIET_S = 3600.0
"""Default limit of a declared span without steps (`job.quiet`). The other ranks wait meanwhile."""


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    beat_s: float = 0.2
    """Interval at which an agent reads its workers' beat pages."""

    abort_s: float = 2.0
    """From the order to abort its process group until a worker must have done so; if it misses it, it is killed
    (rung 2)."""

    respawn_s: float = 10.0
    """From SIGKILL until the process and its device memory must be gone; if they are not, that is reported."""

    etcd_call_s: float = 1.5
    """Deadline of one attempt of one etcd request."""

    lease_ttl_s: float = 5.0
    """How long etcd keeps a node's and a member's key after the last renewal: the time to detect a silent death."""

    lease_renew_s: float = 1.5
    """Interval between renewals."""

    form_s: float = 60.0
    """From the arrival of all ranks until the process group must be initialised; otherwise the generation is broken."""

    group_s: float = 5400.0
    """Timeout of the process group itself, the last resort after all others. Set it above every `job.quiet` in use."""

    def check(self) -> None:
        """Raise ValueError naming both fields of the first relation that does not hold."""
        for field in self.__struct_fields__:
            if getattr(self, field) <= 0:
                raise ValueError(f"timeouts.{field} = {getattr(self, field)}: must be above 0")
        for small, factor, large, why in RELATIONS:
            a, b = getattr(self, small), getattr(self, large)
            if a * factor >= b:
                times = f"{factor:g} × " if factor != 1 else ""
                raise ValueError(f"{times}timeouts.{small} ({a:g} s) must be below timeouts.{large} ({b:g} s): {why}")


RELATIONS: tuple[tuple[str, float, str, str], ...] = (
    ("beat_s", 2, "abort_s", "a worker must be looked at before it is given up"),
    ("abort_s", 1, "respawn_s", "a worker is asked before it is killed"),
    ("lease_renew_s", 2, "lease_ttl_s", "one renewal may be lost without the lease being lost"),
    ("etcd_call_s", 1, "lease_ttl_s", "a renewal must be able to fail and be tried again within the lease"),
    ("abort_s", 1, "lease_ttl_s", "survivors have aborted before a silent node is given up"),
    ("lease_ttl_s", 1, "form_s", "a node that dies while a group forms must be noticed before forming is given up"),
    ("respawn_s", 1, "form_s", "a replacement must be able to come while a group forms"),
    ("form_s", 1, "group_s", "the group's own time-out is the last net"),
)
"""(a, k, b, why): k × a < b."""
