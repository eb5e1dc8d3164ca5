"""The file of a job's secret variables."""

from __future__ import annotations

import pytest

from elastic.contract.job.spec_values import parse_env_file


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("X=1", "1"),
        ("X=", ""),
        ("export X=a b", "a b"),
        ("  X = 1 ", "1"),
        ("X='a \"b\"'", 'a "b"'),
        ('X="$HOME"', "$HOME"),
        ("X=a=b#c", "a=b#c"),
        ("X='", "'"),
    ],
)
def test_a_line(line: str, value: str) -> None:
    assert parse_env_file(f"# what it is for\n\n{line}\n") == {"X": value}


@pytest.mark.parametrize("line", ["secret", "=secret", "a b=secret", "1A=secret", "X=secret\0"])
def test_a_wrong_line_is_named_by_its_number_without_its_value(line: str) -> None:
    with pytest.raises(ValueError, match="line 2") as error:
        parse_env_file(f"A=1\n{line}")
    assert "secret" not in str(error.value)
