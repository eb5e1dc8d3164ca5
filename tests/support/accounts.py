"""Users as the daemon sees them."""

from __future__ import annotations

import os

from elasticd.access.accounts import Accounts, account
from elasticd.agents.run_as import RunAs
from elasticd.base.settings import RunAsSettings


def own_user() -> RunAs:
    """A daemon that runs the jobs of its own user only."""
    return RunAs(RunAsSettings(), account(os.geteuid()), switches=False, accounts=Accounts())
