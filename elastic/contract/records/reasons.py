"""Reasons of our own, as values: code decides on `Code`, and the sentence is made where it is shown. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from elastic.contract.numbers import Int, Real


class Code(enum.StrEnum):
    LISTED = "listed"
    """Several at once, in `because`."""
    CUT = "cut"
    # ── a node is lost ──────────────────────────────────────────────────────────────────────────────────────
    PORT_REFUSES = "port_refuses"
    LEASE_EXPIRED = "lease_expired"
    AGENT_RESTARTED = "agent_restarted"
    UNREACHED = "unreached"
    UNREACHED_PAIR = "unreached_pair"
    # ── beside the training ─────────────────────────────────────────────────────────────────────────────────
    CHECKPOINT_FAILED = "checkpoint_failed"
    FOLDER_APART = "folder_apart"
    IN_A_ROW = "in_a_row"
    STRAY_CHECKPOINT = "stray_checkpoint"
    LATE_EXIT = "late_exit"
    FAILED_LATE = "failed_late"


SENTENCES = {
    Code.LISTED: "{because}",
    Code.CUT: "{because} (cut: the whole record has {nbytes} bytes)",
    Code.PORT_REFUSES: "node {node} is gone: its agent's port refuses connections",
    Code.LEASE_EXPIRED: "node {node} is gone: its agent's lease has run out",
    Code.AGENT_RESTARTED: "node {node} is gone: its agent was started anew",
    Code.UNREACHED: "{node} cannot be reached by {others}",
    Code.UNREACHED_PAIR: "{node} cannot be reached by {other}, nor {other} by {node}",
    Code.CHECKPOINT_FAILED: "checkpoint of step {step} failed: {because}",
    Code.FOLDER_APART: "{folder} is not one folder on {nodes}: what one writes the other does not see; mount the same "
    "folder on all nodes, or set checkpoint.shared = false",
    Code.IN_A_ROW: "{because} ({count} in a row)",
    Code.STRAY_CHECKPOINT: "{folder} on {node} has a checkpoint of generation {saved}; the job is in generation {now} "
    "and goes on without it, but would go back to it if all live state were lost",
    Code.LATE_EXIT: "the process of slot {slot} had not ended within {limit_s} s, and was killed: its script, a thread "
    "or an atexit handler kept it; its log has the stacks",
    Code.FAILED_LATE: "the process of slot {slot} failed after training: {because}",
}


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    code: Code
    values: dict[str, str | Int | Real] = {}
    """What the sentence names."""
    because: tuple[str | Reason, ...] = ()
    """What led to it: at its place in the sentence, else in brackets after that."""

    def __hash__(self) -> int:
        return hash((self.code, frozenset(self.values.items()), self.because))

    def __str__(self) -> str:
        values = {name: f"{v:.10g}" if isinstance(v, float) else str(v) for name, v in self.values.items()}
        because, pattern = ", ".join(map(str, self.because)), SENTENCES[self.code]
        if because and "{because}" not in pattern:
            pattern += " ({because})"
        return pattern.format_map(_Values(values, because=because))


Text = str | Reason
"""A reason of ours, or the words of a person or of another program."""


class _Values(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"  # a job's user can write any record


def reason(code: Code, *because: Text, **values: str | int | float) -> Reason:
    return Reason(code, values, because)


def reasons(text: Text) -> Iterator[Reason]:
    """All in `text`, at any depth."""
    if isinstance(text, Reason):
        yield text
        for each in text.because:
            yield from reasons(each)
