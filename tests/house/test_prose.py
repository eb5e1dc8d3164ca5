"""Sentences for users are not decided on: what code must tell apart is a value of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.source import modules, tree, where

PROSE = frozenset({"because", "detail", "doing", "reason", "restored_from", "said", "source", "waiting_for", "why"})
"""Names of variables, fields and keys that hold sentences."""

OFFENDERS: dict[str, frozenset[str]] = {}
"""Module -> expressions that are allowed."""


def decided_on_prose(module: ast.Module) -> Iterator[str]:
    """Expressions that look at the words of a sentence."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith") and _is_prose(node.func.value):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_is_prose, sides)) and any(map(_is_words, sides)):
                yield ast.unparse(node)


def _is_prose(node: ast.expr) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
            return name in PROSE
    return False


def _is_words(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and any(map(str.isalpha, node.value))


def test_no_decision_depends_on_the_words_of_a_sentence() -> None:
    found = {
        (where(path), expression)
        for path in modules().values()
        for expression in decided_on_prose(tree(path))
        if expression not in OFFENDERS.get(where(path), ())
    }
    assert not found


def test_a_decision_on_words_is_seen() -> None:
    lines = (
        "state.reason.startswith(f'no agent on {me}')", "row['waiting_for'].endswith(' to start')",
        "record.restored_from == 'nothing'", "'boom' in detail",
    )  # fmt: skip
    for line in lines:
        assert list(decided_on_prose(ast.parse(line))) == [ast.unparse(ast.parse(line))]
    for line in ("if reason == '': ...", "known.reason == reason", "detail or 'x'", "kind == 'exit'"):
        assert not list(decided_on_prose(ast.parse(line)))
