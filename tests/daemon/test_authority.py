"""Which user may do what to a job and a node; which users' jobs a node runs."""

from __future__ import annotations

import pytest

from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import SpecRecord
from elastic.contract.records.reasons import Code, codes, reason
from elasticd.access.accounts import Accounts, Looked
from elasticd.access.authority import UNKNOWN, Account, Authority, Peer
from elasticd.agents.run_as import NotAllowed, RunAs, groups
from elasticd.api.routes import routes
from elasticd.base.errors import Refused
from elasticd.base.settings import RunAsSettings

ADMINS = 70
ALICE, BOB, ROOT, DAEMON = (Peer(u, u, n) for u, n in ((1000, "alice"), (1001, "bob"), (0, "root"), (990, "elasticd")))
CAROL = Peer(1002, 1002, "carol", frozenset([1002, ADMINS]))
NAMELESS = Peer(1000, 1000, "1000")
AUTHORITY = Authority(DAEMON.uid, ADMINS, "elasticd-admin")


def spec(owner: Account | None) -> SpecRecord:
    job = JobSpec(name="x", script="/t.py")
    if owner is None:  # of an earlier elasticd
        return SpecRecord(spec=job, submitted_wall_s=0.0, submitted_by="alice")
    return SpecRecord(
        spec=job, submitted_wall_s=0.0, submitted_by=owner.user, uid=owner.uid, gid=owner.gid, user=owner.user
    )


@pytest.mark.parametrize(
    ("peer", "owner", "may"),
    [
        (ALICE, ALICE, True),
        (BOB, ALICE, False),
        (ROOT, ALICE, True),
        (DAEMON, ALICE, True),
        (CAROL, ALICE, True),
        (UNKNOWN, ALICE, False),
        (ALICE, ROOT, False),
        (ALICE, None, False),  # the name alone proves nothing
        (CAROL, None, True),
        (NAMELESS, ALICE, True),  # this machine does not know the name of the same user
        (Peer(1000, 1000, "dave"), ALICE, False),  # another machine has given the number to another user
    ],
)
def test_job_is_changed_by_its_owner_and_admins_only(peer: Peer, owner: Peer | None, may: bool) -> None:
    assert AUTHORITY.may_change(peer, spec(owner)) is may
    if may:
        AUTHORITY.check_job(peer, "x", spec(owner), "stop")
        return
    with pytest.raises(Refused) as refused:
        AUTHORITY.check_job(peer, "x", spec(owner), "stop")
    assert refused.value.status == 403


def test_refusal_names_the_owner_and_the_admin_group() -> None:
    with pytest.raises(Refused) as refused:
        AUTHORITY.check_job(BOB, "x", spec(ALICE), "stop")
    assert str(refused.value) == (
        "you (bob) may not stop job 'x': it belongs to alice; alice, a member of group elasticd-admin or root can"
    )
    with pytest.raises(Refused, match=r"elasticd's own user \(uid 990\) or root can"):
        Authority(990).check_job(BOB, "x", spec(ALICE), "stop")


@pytest.mark.parametrize(("peer", "may"), [(ALICE, False), (CAROL, True), (ROOT, True), (DAEMON, True)])
def test_node_is_changed_by_admins_only(peer: Peer, may: bool) -> None:
    if may:
        AUTHORITY.check_node(peer, "n", "drain")
    else:
        with pytest.raises(Refused, match="may not drain node 'n': a member of group elasticd-admin or root can"):
            AUTHORITY.check_node(peer, "n", "drain")


def test_without_an_admin_group_no_group_is_one() -> None:
    assert not Authority(990).is_admin(CAROL)


@pytest.mark.parametrize(
    ("peer", "owner", "folder", "may"),
    [
        (ALICE, ALICE, ALICE.uid, True),
        (ALICE, ALICE, None, True),
        (BOB, ALICE, ALICE.uid, False),
        (BOB, BOB, ALICE.uid, False),  # left by an earlier job of the same name
        (ALICE, BOB, ALICE.uid, False),  # the name is bob's now
        (ALICE, None, ALICE.uid, False),
        (CAROL, ALICE, ALICE.uid, True),
    ],
)
def test_logs_are_read_by_owner_and_admins_only(peer: Peer, owner: Peer | None, folder: int, may: bool) -> None:
    if may:
        AUTHORITY.check_logs(peer, "x", spec(owner), folder)
    else:
        with pytest.raises(Refused):
            AUTHORITY.check_logs(peer, "x", spec(owner), folder)


def test_logs_of_a_forgotten_job_are_read_by_their_owner() -> None:
    AUTHORITY.check_logs(ALICE, "x", None, ALICE.uid)
    with pytest.raises(Refused, match="they are of uid 1000"):
        AUTHORITY.check_logs(BOB, "x", None, ALICE.uid)


def test_only_root_submits_for_another_user() -> None:
    assert AUTHORITY.submitter(ALICE, "", None) is ALICE
    assert AUTHORITY.submitter(ROOT, "alice", ALICE) is ALICE
    with pytest.raises(Refused, match="may not submit as 'alice'"):
        AUTHORITY.submitter(CAROL, "alice", ALICE)
    with pytest.raises(Refused, match="no such user"):
        AUTHORITY.submitter(ROOT, "alcie", None)


# ── which jobs a node runs ──────────────────────────────────────────────────────────────────────────────────


def looked(found: Account | None, **gids: int) -> Looked:
    return Looked(found, dict(gids), 0.0)


@pytest.mark.parametrize(
    ("owner", "found", "settings", "why"),
    [
        (ALICE, ALICE, RunAsSettings(), None),
        (ALICE, None, RunAsSettings(), Code.NO_USER),
        (ALICE, Account(1007, 1007, "alice"), RunAsSettings(), Code.OTHER_UID),
        (ALICE, ALICE, RunAsSettings(allow=("bob", "@ml")), Code.NOT_ALLOWED),
        (ALICE, ALICE, RunAsSettings(allow=("alice",)), None),
        (CAROL, CAROL, RunAsSettings(allow=("@ml",)), None),
        (ROOT, ROOT, RunAsSettings(), Code.ROOT_NEEDED),
        (ROOT, ROOT, RunAsSettings(allow=("root",)), Code.ROOT_NEEDED),
        (ROOT, ROOT, RunAsSettings(allow_root=True), None),
        (None, None, RunAsSettings(), Code.ROOT_NEEDED),
        (None, None, RunAsSettings(allow_root=True), None),
        (Account(1000, 0, "root"), Account(0, 0, "root"), RunAsSettings(), Code.OTHER_UID),
    ],
)
def test_service_runs_jobs_of_known_and_allowed_users_only(
    owner: Account | None,
    found: Account | None,
    settings: RunAsSettings,
    why: Code | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Accounts, "look", lambda self, user: looked(found, ml=ADMINS))
    refused = RunAs(settings, ROOT, True, Accounts()).why_not(spec(owner))
    assert refused is not None
    assert codes(refused) == ({why} if why else set())


@pytest.mark.parametrize(
    ("owner", "daemon", "runs"),
    [(ALICE, ALICE, True), (None, ALICE, True), (BOB, ALICE, False), (ROOT, ALICE, False), (ROOT, ROOT, True)],
)
def test_daemon_without_systemd_runs_jobs_of_its_own_user_only(owner: Peer | None, daemon: Peer, runs: bool) -> None:
    refused = RunAs(RunAsSettings(), daemon, False, Accounts()).why_not(spec(owner))
    assert refused is not None
    assert codes(refused) == (set() if runs else {Code.OTHER_ACCOUNT})


def test_run_as_waits_for_the_user_database_and_asks_once() -> None:
    accounts = Accounts(groups(RunAsSettings(allow=("@root", "alice"))))
    run_as = RunAs(RunAsSettings(), ROOT, True, accounts)
    job = spec(Account(4_000_000, 1, "no-such-user-here"))
    assert run_as.why_not(job) is None
    assert run_as.why_not(job) is None
    accounts.run_one()
    assert run_as.why_not(job) == reason(Code.NO_USER, user="no-such-user-here")
    with pytest.raises(NotAllowed, match="no-such-user-here"):
        run_as.account(job)
    assert accounts.look("no-such-user-here").groups == {"root": 0}  # type: ignore[union-attr]
    assert run_as.why_not_now(job) == run_as.why_not(job)


def test_a_user_that_the_user_database_loses_just_now_is_not_started_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as = RunAs(RunAsSettings(), ROOT, True, Accounts())
    known = Looked(Account(ALICE.uid, ALICE.gid, ALICE.user), {}, 0.0)
    monkeypatch.setattr(Accounts, "look", lambda self, user: known)
    assert run_as.why_not(spec(ALICE)) == ""
    assert run_as.account(spec(ALICE)) == known.found
    for answer in (None, Looked(None, {}, 0.0), Looked(Account(4_000_000, 1, ALICE.user), {}, 0.0)):
        monkeypatch.setattr(Accounts, "look", lambda self, user, answer=answer: answer)
        with pytest.raises(NotAllowed):
            run_as.account(spec(ALICE))
    with pytest.raises(NotAllowed, match="allow_root"):
        run_as.account(spec(ROOT))


def test_every_change_has_a_name_in_the_audit_trail() -> None:
    assert {answer for verb, _, answer in routes.ROUTES if verb != "GET"} == set(routes.KINDS)
