"""Queries each etcd member separately: with one of three down, the other two hide the loss."""

from __future__ import annotations

from collections.abc import Callable

from elastic.etcd.client import Etcd, MemberHealth
from elasticd.base.log import Log

LOOK_S = 10.0
"""Interval between queries."""
AGAIN_S = 2.0
"""And while a member has failed once, and is shown as before, or none answers: their return is to be shown at once."""
ANSWER_S = 3.0
"""Time limit for a member's answer: TLS is slow on a busy node."""
LOOKS = 2
"""Consecutive failures after which a member is reported as failed."""


class Members:
    def __init__(self, etcd: Etcd, show: Callable[[tuple[MemberHealth, ...]], None], log: Log) -> None:
        self._etcd = etcd
        self._show = show
        self._log = log
        self._missed: dict[str, int] = {}
        self._said: dict[str, str] = {}

    def look(self) -> float:
        """Query all members and publish the result: one that has answered before, and failed to for the first time, is
        shown as before. Returns the pause to the next look."""
        members = []
        for member in self._etcd.members(ANSWER_S):
            missed = 0 if member.ok else self._missed.get(member.endpoint, LOOKS - 1) + 1
            self._missed[member.endpoint] = missed
            members.append(member if missed == 0 or missed >= LOOKS else member._replace(ok=True, error=""))
        for member in members:
            before = self._said.get(member.endpoint, "")
            if member.error and not before:
                self._log.warning("etcd.member_lost", endpoint=member.endpoint, why=member.error)
            elif before and not member.error:
                self._log.info("etcd.member_back", endpoint=member.endpoint)
            self._said[member.endpoint] = member.error
        self._show(tuple(members))
        soon = any(0 < missed < LOOKS for missed in self._missed.values()) or not any(each.ok for each in members)
        return AGAIN_S if soon else LOOK_S
