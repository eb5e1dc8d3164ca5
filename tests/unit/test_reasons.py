"""Reasons of our own: each sentence, on one page (`reasons.txt`, written anew by `make golden`); nothing decides on
their words."""

from __future__ import annotations

import os
import pathlib
import re
import string

import msgspec
import pytest

from elastic.contract.records.reasons import Code, Reason, codes, listed, reason
from elasticd.diagnosis.rules import RULES

PAGE = pathlib.Path(__file__).with_name("reasons.txt")
EXAMPLES: dict[str, str | int | float] = {
    "node": "n1", "other": "n2", "others": "n2, n3", "nodes": "n1, n2", "folder": "/ck", "signal": "SIGSEGV",
    "doing": "computing", "place": "step 41", "furthest": "step 42", "where": "at step 40", "kind": "hang",
    "why": "cordoned: a new disk", "fix": "wait", "backend": "nccl", "needs": 2, "capacity": "3 slots on 3 nodes",
    "endpoint": "n1:7", "owner": "ada", "user": "bob", "phase": "stopped", "state": "T", "key": "g2/0", "ranks": "0, 1",
    "remote": "s3://ck",
}  # fmt: skip
"""Of values that are words; all others are numbers."""


def example(code: Code) -> Reason:
    fields = [field for _, field, _, _ in string.Formatter().parse(code.sentence) if field]
    values = {name: EXAMPLES.get(name, 2.5 if name.endswith("_s") else 3) for name in fields if name != "because"}
    return reason(code, "a person said so" if "because" in fields else "", **values)


def test_the_page_of_all_sentences_is_up_to_date() -> None:
    page = "".join(f"{code}\n    {example(code)}\n" for code in Code)
    if os.environ.get("ELASTIC_REWRITE"):
        PAGE.write_text(page)
    assert page == PAGE.read_text(), "run `make golden`, and read the difference"


@pytest.mark.parametrize("code", Code)
def test_no_rule_matches_the_words_of_a_reason(code: Code) -> None:
    found = [rule.name for rule in RULES if rule.says and re.search(rule.says, str(example(code)))]
    assert not found, "such a rule is to name the code"


def test_a_reason_survives_its_way_through_a_record() -> None:
    nested = listed(reason(Code.LEAVES, "drained by ada", node="n1"), "", reason(Code.NO_PROGRESS, step=3))
    assert msgspec.json.decode(msgspec.json.encode(nested), type=Reason) == nested
    assert codes(nested) == {Code.LISTED, Code.LEAVES, Code.NO_PROGRESS}
    assert str(nested).startswith("n1 leaves: drained by ada; no progress for ? s while ? at step 3, ")


def test_one_text_is_listed_as_itself() -> None:
    assert listed("", "a person's words") == "a person's words"
    assert listed("") == ""
    assert reason(Code.JOINS, "", node="n1") == reason(Code.JOINS, node="n1")
