"""What elasticctl says of itself, and to those who type the words of other programs."""

from __future__ import annotations

import pathlib

import pytest
from click.testing import CliRunner

from elasticd.ctl import main as ctl


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(ctl.main, list(words), prog_name="elasticctl", terminal_width=100)
    return done.exit_code, done.output


def test_each_command_is_one_line_of_the_help() -> None:
    code, text = said("--help")
    assert code == 0
    lines = text.splitlines()
    assert [line[:-1] for line in lines if line[:-1] in ctl.COMMANDS] == list(ctl.COMMANDS)
    for name in ctl.LATE:
        (line,) = [line for line in lines if line.startswith(f"  {name}  ")]
        assert line.endswith("."), line
    assert "elasticctl run --workers 2" in text
    assert said("help") == (0, text)


def test_help_of_a_command() -> None:
    assert said("help", "checkpoint", "export") == said("checkpoint", "export", "--help")
    assert said("help", "fly")[0] == 2
    assert said("help", "status", "fly")[0] == 2


def test_the_version_is_a_command() -> None:
    assert said("version") == said("--version")


@pytest.mark.parametrize("word", ctl.INSTEAD)
def test_the_words_of_other_programs_lead_to_ours(word: str) -> None:
    code, text = said(word, "x")
    assert code == 2
    assert f"there is no {word!r}: see {ctl.INSTEAD[word]}" in text
    assert all(each.strip("` ").split()[0] in ctl.LATE for each in ctl.INSTEAD[word].split(", "))


def test_a_misspelt_command_is_recognised() -> None:
    assert "there is no 'statu': see `status`" in said("statu")[1]
    assert "there is no 'qqq': see `elasticctl help`" in said("qqq")[1]


@pytest.mark.parametrize("words", ["status --socket S", "--socket S status", "checkpoint list --socket S x"])
def test_the_socket_is_named_before_the_command_or_after_it(words: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "none.sock")
    code, text = said(*(path if word == "S" else word for word in words.split()))
    assert code in (1, 5)
    assert f"there is no socket {path}" in text
