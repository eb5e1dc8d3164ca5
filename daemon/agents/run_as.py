"""The user that a job's agents run as on this node, and whether that is allowed.

Under systemd's system manager, as root, an agent is a unit with `User=`: the job's user. Anywhere else elasticd cannot
become another user, so it runs the jobs of its own user and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.contract.records.job_records import SpecRecord
from elastic.contract.records.reasons import Code, Text, reason
from elasticd.access.accounts import Accounts, Looked, look_up
from elasticd.access.authority import ROOT, Account, owner_name
from elasticd.base.settings import RunAsSettings


class NotAllowed(Exception):
    """This node does not run the job."""


@dataclass(frozen=True, slots=True)
class RunAs:
    settings: RunAsSettings
    daemon: Account
    switches: bool
    """Whether agents are started as units of systemd's system manager."""
    accounts: Accounts

    def why_not(self, spec: SpecRecord) -> Text | None:
        """Why this node does not run a job; '' if it does, None if that is not known yet."""
        if not self.switches or spec.uid in (None, ROOT):
            return self._refusal(spec, None)
        looked = self.accounts.look(spec.user)
        return None if looked is None else self._refusal(spec, looked)

    def why_not_now(self, spec: SpecRecord) -> Text:
        """The same, asking the user database, which may take its time."""
        return self._refusal(spec, look_up(spec.user, groups(self.settings)) if self.switches else None)

    def _refusal(self, spec: SpecRecord, looked: Looked | None) -> Text:
        """Why this node does not run a job; '' if it does. `looked`: what the user database says of its user."""
        owner = owner_name(spec)
        if not self.switches:
            if spec.uid in (None, self.daemon.uid):
                return ""
            return reason(Code.OTHER_ACCOUNT, owner=owner, user=self.daemon.user)
        if spec.uid in (None, ROOT):
            return "" if self.settings.allow_root else reason(Code.ROOT_NEEDED, owner=owner)
        account = looked.found if looked else None
        if looked is None or account is None:
            return reason(Code.NO_USER, user=spec.user)
        if account.uid != spec.uid:
            return reason(Code.OTHER_UID, user=spec.user, here=account.uid, there=str(spec.uid))
        allowed = account.user in (allow := self.settings.allow) or any(
            gid in account.groups for gid in looked.groups.values() if gid is not None
        )
        if account.uid == ROOT or (allow and not allowed):
            return reason(Code.NOT_ALLOWED, user=spec.user)
        return ""

    def account(self, spec: SpecRecord) -> Account | None:
        """The user that an agent of the job is to run as; None: the daemon's own. Raises NotAllowed: the user database
        may have given another answer since `why_not`, and what is of another user must never be started as root."""
        looked = self.accounts.look(spec.user) if self.switches and spec.uid not in (None, ROOT) else None
        if why := self._refusal(spec, looked):
            raise NotAllowed(str(why))
        return looked.found if looked else None


def groups(settings: RunAsSettings) -> tuple[str, ...]:
    return tuple(name.removeprefix("@") for name in settings.allow if name.startswith("@"))
