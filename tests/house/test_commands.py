"""Each command, option and request that a page names exists, and each that exists is on a page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from support.source import ROOT, tracked, where

from elasticd.api.routes.routes import ROUTES
from elasticd.ctl.main import main as elasticctl
from elasticd.main import _parser

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_CALL = re.compile(r"^(?:.*-- |srun .*|\S+/)?(elasticctl|elasticd) (.+)")
_NEXT = re.compile(r" && |\"?\$\(|\)\"?|; | [|&>#] ?")
"""Between two commands of a line, or between a command and what is not of it."""
_COMMAND = re.compile(r"[a-z][a-z-]+$")
_OPTION = re.compile(r"--?[a-z]")


def calls(page: str) -> Iterator[tuple[str, list[str]]]:
    """(program, its arguments) for each call of elasticctl or elasticd in the code of a page."""
    fenced = [line for block in _FENCE.findall(page) for line in block.splitlines()]
    prose = _FENCE.sub("", page)
    indented = re.findall(r"^ {4,}(.*)", prose, re.MULTILINE)
    spans = [" ".join(span.split()) for span in _SPAN.findall(prose)]
    for code in (*fenced, *indented, *spans):
        for part in _NEXT.split(code.strip()):
            if match := _CALL.match(part.strip()):
                yield match[1], re.sub(r"[][…']", " ", match[2]).split()


def wrong(program: str, words: list[str]) -> str:
    """Why a call cannot be: an unknown command or option; '' if it can."""
    if program == "elasticd":
        known = _parser()._option_string_actions
        return next((w for w in words if w.startswith("--") and w.partition("=")[0] not in known), "")
    command: click.Command = elasticctl
    context = click.Context(elasticctl)
    seen = False
    for word in words:
        if word in ("--", "COMMAND") or (seen and word.endswith(".py")):
            break
        if isinstance(command, click.Group) and _COMMAND.match(word) and not _is_value(words, word):
            found = command.get_command(context, word)
            if found is None:
                return word
            command, seen = found, command is elasticctl
        elif _OPTION.match(word) and word.partition("=")[0] not in options(command):
            return f"{command.name} {word}"
    return ""


def _is_value(words: list[str], word: str) -> bool:
    at = words.index(word)
    return at > 0 and words[at - 1] == "--socket"


def options(command: click.Command) -> set[str]:
    """Every spelling of its options, hidden ones too, and those that each command has."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}


def commands(group: click.Group = elasticctl, above: str = "") -> Iterator[str]:
    """'status', 'checkpoint list', … : each command that is no group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        elif command is not None and not command.hidden:
            yield above + name


def _pages() -> dict[str, str]:
    return {where(p): p.read_text() for p in tracked() if p.suffix == ".md"}


def test_every_command_and_option_on_a_page_exists() -> None:
    found = [(page, *call) for page, text in _pages().items() for call in calls(text)]
    assert len(found) > 100, "the pages were not read"
    assert not [(page, why, words) for page, program, words in found if (why := wrong(program, words))]


def test_every_command_is_on_a_page() -> None:
    named = {
        " ".join(word for word in words[:2] if _COMMAND.match(word))
        for page, text in _pages().items()
        if page != "CHANGELOG.md"
        for program, words in calls(text)
        if program == "elasticctl"
    }
    assert not [c for c in commands() if not any(n == c or n.startswith(f"{c} ") for n in named)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("`elasticctl status JOB`", ""),
        ("`elasticctl run --nodes 1:2 train.py --lr 0.1`", ""),
        ("`elasticctl --socket s.sock status --watch`", ""),
        ("    elasticctl drain NODE --wait && elasticctl uncordon NODE", ""),
        ("`elasticctl\nfly`", "fly"),
        ("    elasticctl drain NODE --wait && elasticctl uncordon --wait", "uncordon --wait"),
        ("```\nelasticctl checkpoint fly x\n```", "fly"),
        ("`elasticctl run --fly train.py`", "run --fly"),
        ("`elasticd --fly`", "--fly"),
    ],
)
def test_a_wrong_call_is_seen(text: str, why: str) -> None:
    found = [wrong(program, words) for program, words in calls(text)]
    assert found, "no call was read"
    assert next((reason for reason in found if reason), "") == why


def test_every_page_is_in_the_site_and_on_its_first_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    pages |= {f"howto/{path.name}" for path in (ROOT / "docs" / "howto").glob("*.md")}
    nav = set(re.findall(r"([a-z/-]+\.md)", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]))
    linked = set(re.findall(r"\(([a-z/-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert pages - nav == set()
    assert pages - linked - {"index.md"} == set()


def test_the_api_page_has_every_request_and_no_other() -> None:
    named = set(re.findall(r"^\| `((?:GET|POST|DELETE) /v1/[^`]*)`", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    routes = {f"{verb} {re.sub(r'[(][?]P<(.+?)>.*?[)]', lambda m: m[1].upper(), x.pattern)}" for verb, x, _ in ROUTES}
    assert named == routes - {"GET /v1/doctor/local"}, "asked by other daemons only"
