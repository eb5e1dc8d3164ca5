"""Reasons of our own, as values: code decides on `Code`, and the sentence is made where it is shown. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec

from elastic.contract.numbers import Int, Real


class Code(enum.StrEnum):
    """Each with its sentence, in which values stand by name; what led to it is added, unless it has a place there. A
    sentence is reworded at will; a code is in records."""

    sentence: str

    def __new__(cls, value: str, sentence: str) -> Code:
        member = str.__new__(cls, value)
        member._value_, member.sentence = value, sentence
        return member

    LISTED = "listed", "{because}"
    CUT = "cut", "{because} (cut: the whole record has {nbytes} bytes)"
    # ── a node is lost ──────────────────────────────────────────────────────────────────────────────────────
    PORT_REFUSES = "port_refuses", "node {node} is gone: its agent's port refuses connections"
    LEASE_EXPIRED = "lease_expired", "node {node} is gone: its agent's lease has run out"
    AGENT_RESTARTED = "agent_restarted", "node {node} is gone: its agent was started anew"
    NODE_GONE = "node_gone", "node {node} is gone"
    UNREACHED = "unreached", "{node} cannot be reached by {others}"
    UNREACHED_PAIR = "unreached_pair", "{node} cannot be reached by {other}, nor {other} by {node}"
    # ── a worker ends, or is hung ───────────────────────────────────────────────────────────────────────────
    EXITED = "exited", "exit code {status}"
    AFTER_SIGTERM = "after_sigterm", "exit code {status} after SIGTERM"
    KILLED = "killed", "killed by {signal}"
    OOM_KILLED = "oom_killed", "killed by {signal}: out of memory (the kernel's OOM killer)"
    ENDED_EARLY = "ended_early", "exited with code 0 before the job was done"
    UNREADABLE = "unreadable", "it sent a message that its agent cannot read"
    NOT_STARTED = "not_started", "a worker cannot be started"
    ZYGOTE_DIES = "zygote_dies", "the process that forks workers (zygote) dies before it has forked one"
    ENDED_UNSTARTED = "ended_unstarted", "it was ended before it was started"
    LATE_ABORT = "late_abort", "did not abort in time"
    LATE_END = "late_end", "did not end in time"
    OVERTAKEN = "overtaken", "a standby was ready before it"
    STOPPED = "stopped", "its process is stopped by a signal"
    SILENT = "silent", "silent for {for_s} s"
    NO_PROGRESS = "no_progress", "no progress for {for_s} s while {doing} at step {step}, which takes {step_s} s"
    PATIENCE = "patience", "its patience is {patience_s} s"
    IN_IO = "in_io", "in uninterruptible I/O (state D)"
    DEAF = "deaf", "no thread of it runs Python: a call keeps the interpreter's lock (GIL)"
    OTHERS_WAIT = "others_wait", "{who} has got further and waits for {for_s} s"
    ENDS_SLOWLY = "ends_slowly", "it was killed or exits, and its process has not ended for {for_s} s"
    WAITED = "waited", "rank of slot {slot} has waited for other ranks for {for_s} s ({doing} at step {step})"
    STORE_ALTERED = "store_altered", "the store holds a value that no rank of this generation wrote: {key}"
    STORE_GREW = "store_grew", "its store grew by {mib} MiB, {most} are allowed, and was closed"
    LEFT_GROUP = "left_group", "left its group, and nothing followed"
    CALLED_OFF = "called_off", "stopped for a drain that was called off"
    AT_BOUNDARY = (
        "at_boundary",
        "failed before the step boundary: a rank that leaves may be the only one with the last step",
    )
    BAD_NUMBERS = "bad_numbers", "{kind} on rank {ranks} at step {step}"
    # ── the membership changes ──────────────────────────────────────────────────────────────────────────────
    FIRST = "first", "first forming"
    BROKE = "broke", "{kind} on {node}"
    LEAVES = "leaves", "{node} leaves"
    JOINS = "joins", "{node} joins"
    GENERATION_BROKEN = "generation_broken", "generation is broken"
    SLOTS_CHANGE = "slots_change", "{node} changes its workers"
    REORDERED = "reordered", "ranks reordered"
    SURPLUS = "surplus", "the job has all nodes that it may have (nodes = {nodes})"
    EXCLUDED = "excluded", "{node} is excluded for this job (elasticctl uncordon {node} takes it back)"
    FAILS_MORE = "fails_more", "its workers fail there more often"
    GPU_FAULTY = "gpu_faulty", "a GPU is faulty"
    TAKEN_AWAY = "taken_away", "the machine is being taken away"
    SHUTS_DOWN = "shuts_down", "the machine shuts down"
    AGENT_ENDED = "agent_ended", "its agent was told to end"
    DRAINED = "drained", "drained"
    JOB_OVER = "job_over", "{phase}"
    NAME_REUSED = "name_reused", "a new job uses this name"
    # ── no change of the membership now ─────────────────────────────────────────────────────────────────────
    UNCHANGED = "unchanged", "no change needed"
    TOO_FEW = "too_few", "{count} of at least {least} nodes"
    TOO_FEW_STAY = "too_few_stay", "leaving now would leave {count} of at least {least} nodes"
    MORE_MAY_COME = "more_may_come", "{count} of at most {most} nodes are ready; a moment for more"
    ETCD_WAS_AWAY = "etcd_was_away", "etcd was away: {nodes} may not have come back yet"
    ETCD_LOST_DATA = "etcd_lost_data", "a planned change waits: etcd has lost its data a moment ago"
    UNHEARD = "unheard", "{nodes} cannot be heard of, and may live"
    NOT_STEPPED = "not_stepped", "a planned change waits until this generation has stepped"
    STANDS_STILL = "stands_still", "a planned change waits for steps to advance"
    OTHER_SCRIPT = (
        "other_script",
        "the script on {node} is not the one that {other} began with: put the same on both, stop the job and submit it "
        "again",
    )
    LEFT_OUT = "left_out", "this node waits with its state"
    CHECKING = "checking", "nodes are checking their connections to each other"
    OTHERS_FINISH = "others_finish", "training is complete; the others are finishing"
    SAVING = "saving", "the last checkpoint to be saved"
    PAUSES = "pauses", "{count} generations in a row broke before their first step; again within {pause_s} s"
    WOULD_BE_LOST = "would_be_lost", "the job has no checkpoint.dir, so its state would be lost"
    NEWEST_FAILURE = "newest_failure", "the newest failure, on {node}"
    TRIED_AGAIN = "tried_again", "{node} is tried again and again"
    WORKERS_START = "workers_start", "slot {slots} of {node} to start"
    RANKS_START = "ranks_start", "all ranks to start in generation {number}"
    # ── what an agent does before its workers are at work ───────────────────────────────────────────────────
    AGENT_STARTS = "agent_starts", "importing torch in a new agent"
    AGENT_WAITS = "agent_waits", "waiting ({because})"
    IMPORTS = "imports", "importing torch and the script's modules"
    SETS_UP = "sets_up", "running the script up to the end of setup in slot {slots}"
    FORMS = "forms", "forming generation {number}"
    RESTS = "rests", "pausing before the next start in slot {slots}"
    # ── a job has too few nodes, by the daemons' plan ───────────────────────────────────────────────────────
    NEVER = "never", "can never run here: it needs {needs}, the cluster has {capacity}"
    NODE_IS = "node_is", "{node} is {state}"
    REFUSES = "refuses", "{node} does not run this job"
    RESERVED = "reserved", "{node} is reserved for {other}, which has waited longer"
    NO_SLOTS = "no_slots", "{node} has {free} of {total} slots free, {needs} are needed"
    NO_GPUS = (
        "no_gpus",
        "{node} has {free} of {total} GPUs free, {needs} are needed, one per worker: {fix}, or submit with fewer "
        "workers per node or backend gloo",
    )
    HAS_NO_GPU = "has_no_gpu", "{node} has no GPU, and {who} (backend gloo trains on CPUs)"
    OTHERS_ON_CPUS = "others_on_cpus", "{node} has GPUs, and the job's other nodes train on their CPUs (backend auto)"
    TURN = "turn", "its turn, number {count} of {total} in the queue"
    DESERTED = "deserted", "no agent of it is left"
    NO_AGENT = "no_agent", "no agent comes up on {node}"
    # ── a node takes no work, or not that of a job ──────────────────────────────────────────────────────────
    NO_DESCRIPTORS = "no_descriptors", "{who} has no file descriptors left: no agent can be started here"
    STATE_DIR = "state_dir", "state_dir {folder}"
    DISK_FULL = "disk_full", "state_dir {folder} has {free_mb} MB left, {least_mb} MB are needed for logs and state"
    HEALTH_CHECK = "health_check", "health check {check}: {because}"
    SELF_TEST = "self_test", "self-test of its GPUs is under way"
    NOT_TESTED = "not_tested", "the self-test of its GPUs cannot be started: {because}; tried again"
    OTHER_ACCOUNT = (
        "other_account",
        "it is of {owner}, and elasticd runs as {user} here, not as a service of systemd: it can start jobs of {user} "
        "only",
    )
    ROOT_NEEDED = (
        "root_needed",
        "it is of {owner}, and jobs run as root only with run_as.allow_root = true; root can submit it for another "
        "user with --as USER",
    )
    NO_USER = "no_user", "there is no user {user!r} on this machine"
    OTHER_UID = "other_uid", "{user} is uid {here} on this machine, and uid {there} where the job was submitted"
    NOT_ALLOWED = "not_allowed", "run_as.allow on this machine names neither {user} nor a group that {user} is in"
    # ── no step is made ─────────────────────────────────────────────────────────────────────────────────────
    NOT_FORMED = "not_formed", "generation {number} is broken, and the next one has not formed yet"
    ALL_WAIT = "all_wait", "all {count} ranks wait for each other in {place}"
    UNKNOWN_RANK = "unknown_rank", "the others wait, and it is not among those that are known to wait"
    AND_OTHERS = "and_others", "like {count} others"
    IN_QUIET = "in_quiet", "it is in a span declared with job.quiet in {place}"
    DOES_NOT_WAIT = "does_not_wait", "it is {doing} in {place}"
    HAS_RETURNED = "has_returned", "its train has returned in {place}, others go on"
    BEHIND = "behind", "it waits in {place} while others have got to {furthest}"
    # ── a job is not tried again ────────────────────────────────────────────────────────────────────────────
    MISUSE = "misuse", "the script does what elastic refuses, and is not tried again"
    FAILS_AT_ONCE = "fails_at_once", "the script fails before its first step, and would again"
    CRASH_LOOP = "crash_loop", "crash loop: the same failure {where}, {count} times"
    ENDS_ALIKE = "ends_alike", "crash loop: the same end {where}, {count} times in a row"
    OVER_BUDGET = "over_budget", "failed {count} times within {window_s} s, at most {budget} allowed (restarts.budget)"
    STATE_LOST = (
        "state_lost",
        "all state was lost, and no checkpoint was ever saved: step {step} was done, begun again from 0",
    )
    # ── a process group is not formed ───────────────────────────────────────────────────────────────────────
    RANKS_MISSING = "ranks_missing", "only {arrived} of {total} ranks came within {within_s} s"
    NO_STORE = "no_store", "no store at {endpoint} within {within_s} s"
    STORE_UNKNOWN = "store_unknown", "{node}, which has the store, was not found within {within_s} s"
    NOT_FORMING = "not_forming", "generation {number}, rank {rank}"
    # ── beside the training ─────────────────────────────────────────────────────────────────────────────────
    CHECKPOINT_FAILED = "checkpoint_failed", "checkpoint of step {step} failed"
    AT_STEP = "at_step", "step {step}"
    NO_SHARED_MEMORY = "no_shared_memory", "no shared memory for snapshots"
    LEAVES_TOO_LITTLE = "leaves_too_little", "no memory: {mb} MB on this node would leave too little"
    TOO_MANY_PARTS = "too_many_parts", "a snapshot of {parts} parts; one of {most} at most can be handed over"
    REPLICAS_ELSEWHERE = "replicas_elsewhere", "no step: each part has replicas on other nodes"
    COPIED_ELSEWHERE = "copied_elsewhere", "the steps since step {step}, of which other nodes have copies"
    NOT_COPIED_YET = "not_copied_yet", "the steps since the last checkpoint: {node}'s parts are not copied yet"
    NO_NODE_FOR_COPY = (
        "no_node_for_copy",
        "the steps since the last checkpoint: no other node to copy {node}'s parts to",
    )
    NO_MEMORY_FOR_COPY = (
        "no_memory_for_copy",
        "the steps since the last checkpoint: the node after {node} has no memory for a copy of its parts",
    )
    COPY_BROKEN = (
        "copy_broken",
        "the steps since the last checkpoint: {node} does not reach the node that is to have a copy of its parts",
    )
    NOT_ORDERED = "not_ordered", "commit"
    NOT_DURABLE = "not_durable", "the process that was to commit it has left before it was durable"
    COPY_FAILED = "copy_failed", "copy to {remote}"
    NOT_COPIED = (
        "not_copied",
        "{because}; no node copies this checkpoint to {remote}: with checkpoint.shared = false the leader's node "
        "copies its own",
    )
    FOLDER_APART = (
        "folder_apart",
        "{folder} is not one folder on {nodes}: what one writes the other does not see; mount the same folder on all "
        "nodes, or set checkpoint.shared = false",
    )
    IN_A_ROW = "in_a_row", "{because} ({count} in a row)"
    STRAY_CHECKPOINT = (
        "stray_checkpoint",
        "{folder} on {node} has a checkpoint of generation {saved}; the job is in generation {now} and goes on without "
        "it, but would go back to it if all live state were lost",
    )
    LATE_EXIT = (
        "late_exit",
        "the process of slot {slot} had not ended within {limit_s} s, and was killed: its script, a thread or an "
        "atexit handler kept it; its log has the stacks",
    )
    TOOK_TOO_LONG = "took_too_long", "the rest of its script had not ended within exit_timeout_s = {limit_s} s"
    FAILED_LATE = "failed_late", "the process of slot {slot} failed after training"


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    code: Code
    values: dict[str, str | Int | Real] = {}
    """What the sentence names."""
    because: tuple[str | Reason, ...] = ()
    """What led to it."""

    def __hash__(self) -> int:
        return hash((self.code, frozenset(self.values.items()), self.because))

    def __str__(self) -> str:
        values = {name: f"{v:.10g}" if isinstance(v, float) else str(v) for name, v in self.values.items()}
        because, pattern = "; ".join(map(str, self.because)), self.code.sentence
        if because and "{because}" not in pattern:
            pattern += ": {because}"
        return pattern.format_map(_Values(values, because=because))


Text = str | Reason
"""A reason of ours, or the words of a person or of another program."""


class _Values(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"  # a job's user can write any record


def reason(code: Code, /, *because: Text, **values: str | int | float) -> Reason:
    return Reason(code, values, tuple(filter(None, because)))


def listed(*texts: Text) -> Text:
    """Those that are not '' as one: itself, if it is one only."""
    several = reason(Code.LISTED, *texts)
    return several if len(several.because) > 1 else several.because[0] if several.because else ""


def reasons(text: Text) -> Iterator[Reason]:
    """All in `text`, at any depth."""
    if isinstance(text, Reason):
        yield text
        for each in text.because:
            yield from reasons(each)


def in_words(value: Any) -> Any:
    """A record, or a part of one, as plain data in which each reason is its sentence."""
    match value:
        case Reason():
            return str(value)
        case msgspec.Struct():
            return {name: in_words(getattr(value, name)) for name in value.__struct_fields__}
        case dict():
            return {name: in_words(part) for name, part in value.items()}
        case tuple() | list():
            return [in_words(part) for part in value]
        case enum.Enum():
            return value.value
    return value


def codes(text: Text) -> frozenset[Code]:
    return frozenset(each.code for each in reasons(text))
