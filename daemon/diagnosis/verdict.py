"""The verdict on an incident: what failed first, of which class, on what evidence, and what to do about it. Pure.

Made by rules (`rules`) from the incident's record and from what the daemon sees now. A verdict never advises
to stop a job: a person is needed only where the job has ended with a failure, where the recovery does not end, or where
no checkpoint is written until a folder is shared.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from msgspec.structs import replace

from elastic.contract.origin import Origin
from elastic.contract.records.incident_account import CONSEQUENCES
from elastic.contract.records.job_records import Cause, IncidentRecord, Phase
from elastic.contract.records.reasons import Code, codes, reasons
from elastic.contract.texts import cut_middle, one_line
from elasticd.base import phrases
from elasticd.base.answers import Cost, Evidence, Verdict

from .rules import RULES, Rule

PATIENCE_S = 300.0
"""A recovery that takes longer needs a person's attention, whatever it waits for."""
LASTING_S = 60.0
"""The same, where etcd refuses this cluster: that does not pass by itself."""
LAST_LINES = 12
"""How many of the last lines of a log are searched and shown."""
FRAMES = 12
"""How many frames of a hung process's main thread are searched: those further out only called these."""
TEXT_CHARS, LINE_CHARS, STACK_CHARS, STACK_LINE_CHARS = 2_000, 1_000, 20_000, 500
"""How much is searched of a message or report, of a line of a log, of a stack and of a line in it. A job's user can
write longer ones, and the time that a pattern takes grows with the square of a line's length."""

KILLED = ("SIGKILL", "SIGTERM")
"""Signals that come from outside: what the log ends with is not the reason for them."""

_EXCEPTION = re.compile(r"^(\w+\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt|Iteration)\b")
_FRAME = re.compile(r'File "[^"\n]+", line \d+(?:, in [^\n]+)?')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/elastic/(worker|checkpoint|contract)/|<frozen")
"""Frames that are not the script's own."""
_BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True, slots=True)
class VerdictContext:
    """What is known beside the record."""

    phase: Phase = Phase.RUNNING
    age_s: float = 0.0
    """Since the incident began."""
    etcd_error: str = ""
    """Why etcd cannot be reached now; empty: it can."""
    etcd_alarms: tuple[str, ...] = ()
    waits_for: str = ""
    """What the job waits for now."""
    gpus: bool = False
    """Whether the ranks use one GPU each."""
    one_host: bool = False
    """Whether all nodes have loopback addresses, as on one machine: such an address then means nothing."""


def has_cause(record: IncidentRecord) -> bool:
    """Whether an agent has said what failed. For a moment a record may be there without: of one that saw only that the
    group is over."""
    return bool(record.node) or not record.open or record.kind != "lost"


def judge(record: IncidentRecord, seen: VerdictContext = VerdictContext()) -> Verdict:
    texts, open_ = _texts(record), record.open and not seen.phase.over
    rule, decided = _rule(record, texts, seen)
    by_etcd = _held(seen) if open_ else None
    failed = seen.phase is Phase.FAILED and (record.origin is Origin.NOTHING or record.kind == "late exit")
    detail = str(record.detail)
    cause = f"{rule.what} ({detail})" if detail not in rule.what else rule.what
    where = phrases.ranks(record.ranks), f"on {record.node}" if record.node else ""
    patience_s = LASTING_S if by_etcd and by_etcd[0].name != "etcd_unavailable" else PATIENCE_S
    return Verdict(
        rule=rule.name,
        cls=rule.cls,
        cause=cause,
        what=": ".join(filter(None, (" ".join(filter(None, where)), cause))),
        evidence=_evidence(record, texts, decided, by_etcd[1] if by_etcd else ""),
        followed=_followed(record),
        done=_done(record, open_, seen.phase),
        cost=_cost(record, seen, open_),
        held_by=f"{by_etcd[0].what}: {by_etcd[1]}" if by_etcd else seen.waits_for if open_ else "",
        person=failed or (open_ and seen.age_s > patience_s) or (rule.person and not seen.phase.over),
        fix=by_etcd[0].fix if by_etcd else rule.fix,
    )


# ── the rule ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Texts:
    """What the failure left behind, by source."""

    says: tuple[Evidence, ...]
    logs: tuple[Evidence, ...]
    stacks: tuple[Evidence, ...]
    signal: str


def _texts(record: IncidentRecord) -> _Texts:
    error = record.error
    death = next((each for each in reasons(record.detail) if each.code in (Code.KILLED, Code.OOM_KILLED)), None)
    signal = str(death.values.get("signal", "")) if death else (error.signal or "") if error else ""
    killed = signal in KILLED and (error is None or error.exit_code is None)  # else its script has handled the signal
    of = f"report of {record.node}" if record.node else "report"
    report = _shown(of, cut_middle(str(record.detail), TEXT_CHARS))
    says, logs = [], []
    if error is not None:
        of = f"rank {error.rank} on {error.node}" if error.rank >= 0 else f"slot {error.slot} on {error.node}"
        says += [_shown(f"error of {of}", cut_middle(error.message, TEXT_CHARS))] if error.message else []
        lines = error.last_lines or tuple(line for line in error.traceback.splitlines() if line.strip())
        logs = [_shown(f"log of {of}", cut_middle(line.strip(), LINE_CHARS), True) for line in lines[-LAST_LINES:]]
        says += [line for line in reversed(logs) if not killed and _EXCEPTION.match(line.line)][:1]
    says.append(report)
    if error is not None and not killed and (frames := _FRAME.findall(error.traceback)):
        own = [frame for frame in frames if not _LIBRARY.search(frame)]
        says.append(_shown(f"traceback of {of}", (own or frames)[-1]))
    stacks = tuple(_shown(f"stack of {who}", main_thread(stack)) for who, stack in record.stacks.items())
    if record.last_lines:
        log = f"log of {phrases.ranks(record.ranks)} on {record.node}"
        logs = [_shown(log, cut_middle(line, LINE_CHARS), True) for line in record.last_lines[-LAST_LINES:]]
    return _Texts(tuple(says), tuple(logs), stacks, signal)


def _shown(source: str, line: str, from_log: bool = False) -> Evidence:
    return Evidence(source=source, line=line, from_log=from_log)


def _rule(record: IncidentRecord, texts: _Texts, seen: VerdictContext) -> tuple[Rule, Evidence | None]:
    misuse = record.error is not None and record.error.misuse
    given, raised = codes(record.detail), record.error.exception if record.error is not None else ""
    for rule in RULES:
        if rule.misuse and not misuse:
            continue
        if (rule.kinds and record.kind not in rule.kinds) or (rule.name == "loopback" and seen.one_host):
            continue
        if rule.name == "node_lost" and not record.node:
            continue
        decides = rule.codes or rule.exceptions or rule.says or rule.logs or rule.stacks or rule.signal
        if not decides or not given.isdisjoint(rule.codes) or raised in rule.exceptions:
            return rule, None
        if rule.signal and texts.signal == rule.signal:
            return rule, next((e for e in texts.says if rule.signal in e.line), None)
        if found := _match(rule, texts):
            return rule, found
    raise AssertionError("the last rule matches every incident")


def _match(rule: Rule, texts: _Texts) -> Evidence | None:
    logs = texts.logs if texts.signal and texts.signal not in KILLED else ()
    # Of the stacks only the suspect's counts; the other one waits for it.
    for pattern, where in ((rule.says, texts.says), (rule.logs, logs), (rule.stacks, texts.stacks[:1])):
        for evidence in where if pattern else ():
            if hit := re.search(pattern, evidence.line):
                before, after = evidence.line[: hit.start()], evidence.line[hit.start() :]
                return replace(evidence, line=(before.rpartition("\n")[2] + after.partition("\n")[0]).strip())
    return None


def _held(seen: VerdictContext) -> tuple[Rule, str] | None:
    """(rule, etcd's own words) if etcd holds the recovery up."""
    if "NOSPACE" in seen.etcd_alarms:
        return _BY_NAME["etcd_no_space"], "alarm NOSPACE"
    if not seen.etcd_error:
        return None
    refused = re.search(_BY_NAME["etcd_refused"].says, f"etcd: {seen.etcd_error}")
    return _BY_NAME["etcd_refused" if refused else "etcd_unavailable"], seen.etcd_error


# ── its parts ───────────────────────────────────────────────────────────────────────────────────────────────


def _evidence(record: IncidentRecord, texts: _Texts, decided: Evidence | None, etcd: str) -> list[Evidence]:
    """The line that decided first; then the exit, the report, the suspect's stack, and etcd's own words."""
    lines = [decided] if decided else []
    if error := record.error:
        code = f"exit code {error.exit_code}" if error.exit_code is not None else ""
        how = " after ".join(part for part in (code, error.signal) if part)
        lines += [_shown(f"exit of rank {error.rank} on {error.node}", how)] if how and error.rank >= 0 else []
    lines += [replace(e, line=one_line(e.line)) for e in texts.says if e.line]
    lines += [replace(e, line=_innermost(e.line)) for e in texts.stacks[:1]]
    lines += [_shown("etcd", etcd)] if etcd else []
    kept: dict[str, Evidence] = {}
    for evidence in lines:
        if evidence.line and not any(evidence.line in other.line for other in kept.values()):
            kept[evidence.source + evidence.line] = evidence
    return list(kept.values())


def main_thread(dump: str) -> str:
    """The innermost frames of the main thread, which runs the script; of a dump of another form, all of it.

    In a dump of py-spy each thread has a line, then its frames, the innermost one first.
    """
    lines = [line[:STACK_LINE_CHARS] for line in dump[:STACK_CHARS].split("\n") if line.strip()]
    for i, line in enumerate(lines):
        if line.startswith("Thread ") and '"MainThread"' in line:
            frames = list(itertools.takewhile(lambda frame: frame[0] in " \t", lines[i + 1 :]))
            if frames:
                return "\n".join(frames[:FRAMES])
    return "\n".join(lines)


def _innermost(stack: str) -> str:
    """The innermost frame of a py-spy dump: the first indented line."""
    return next((line.strip() for line in stack.splitlines() if line.startswith(" ")), stack.partition("\n")[0])


def _followed(record: IncidentRecord) -> list[str]:
    """One line for each group of equal failures beside the first cause."""
    first, *rest = record.causes or (None,)
    if first is None or not rest:
        return []
    groups: dict[tuple[bool, str, str], list[Cause]] = {}
    for cause in rest:
        groups.setdefault((cause.generation > first.generation, cause.kind, str(cause.detail)), []).append(cause)
    lines = []
    for (is_later, kind, detail), causes in groups.items():
        nodes = ", ".join(dict.fromkeys(cause.node for cause in causes))
        ranks = phrases.ranks(rank for cause in causes for rank in cause.ranks)
        later = " during the recovery" if is_later else ""
        as_well = "" if kind in CONSEQUENCES else " as well"
        lines.append(f"{kind}{as_well}{later} on {nodes}{f', {ranks}' if ranks else ''}: {detail}")
    return lines


def _done(record: IncidentRecord, open_: bool, phase: Phase) -> str:
    if open_:
        return "the recovery is under way"
    if record.kind == "late exit" and phase is Phase.FAILED:
        return "training is complete; what its script does after it is not"
    if record.kind in ("checkpoint", "late exit"):
        return "training was not interrupted"
    before, after = record.world_size_before, record.world_size_after
    if record.origin is Origin.NOTHING:
        if phase in (Phase.STOPPING, Phase.STOPPED):
            return "the job was stopped"
        return "the job was given up" if phase is Phase.FAILED else "no step came of this recovery"
    world = f"world {before} → {after}" if before != after else f"world {after} as before"
    if record.step is None:
        return f"all workers were started again (the script does not call elastic.run); {world}"
    lost = {rank for c in record.causes if _first(record, c) for rank in c.ranks} | set(record.ranks)
    again = any(not _first(record, c) for c in record.causes)
    kept = max(0, before - len(lost))
    parts = []
    if lost:
        parts.append(f"{phrases.ranks(lost)} {'replaced' if after >= before else 'gone'}")
    if not lost and record.kind == "planned":  # ranks that leave, or move, end their process: which is not on record
        parts.append("each rank that stays kept its process")
    elif not again and kept:
        who = f"{'all' if not lost else 'the other'} {kept} ranks" if kept > 1 else "the other rank"
        parts.append(f"{who} kept {'their' if kept > 1 else 'its'} process")
    if record.origin is not None and (source := _SOURCES.get(record.origin)):
        parts.append(source)
    return "; ".join([*parts, world])


def _first(record: IncidentRecord, cause: Cause) -> bool:
    return cause.generation == record.causes[0].generation


_SOURCES = {
    Origin.LIVE: "state from a living rank",
    Origin.SNAPSHOT: "state from the newest snapshot in memory",
    Origin.CHECKPOINT: "state from the newest checkpoint",
    Origin.SETUP: "training began again at step 0",
}


def _cost(record: IncidentRecord, seen: VerdictContext, open_: bool) -> Cost:
    took_s = record.still_s + seen.age_s if open_ else record.took_s
    if record.kind in ("checkpoint", "late exit"):
        took_s = 0.0
    rank_s = round(took_s * record.world_size_before, 3) if took_s is not None else None
    return Cost(
        steps=record.steps_lost,
        steps_at_most=record.steps_lost_at_most,
        rank_s=rank_s,
        gpu_s=rank_s if seen.gpus else None,
    )
