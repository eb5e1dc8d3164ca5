"""The animation of a terminal session: examples/record.py."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest
from support.source import ROOT


@pytest.fixture(scope="module")
def record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_record", ROOT / "examples" / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_lines_have_their_styles_columns_and_instants(record: ModuleType) -> None:
    written = record.lines([(1.0, "plain \x1b[1;32mgr"), (2.5, "een\x1b[0m end\r\n\r\nlast")])
    assert [line.at_s for line in written] == [2.5, 2.5]
    assert [(p.text, p.column, p.colour, p.bold) for p in written[0].pieces] == [
        ("plain ", 0, record.PLAIN, False), ("green", 6, record.COLOURS[32], True), (" end", 11, record.PLAIN, False),
    ]  # fmt: skip
    assert written[1].pieces == ()


@pytest.mark.parametrize("text", ["\x1b[2J\n", "50 %\r51 %\n", "\x1b]0;title\x07\n"])
def test_a_program_that_moves_the_cursor_is_refused(record: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="only colours"):
        record.lines([(0.0, text)])


def test_pauses_are_shortened_and_short_times_are_kept(record: ModuleType) -> None:
    short = record.without_pauses(record.lines([(1.0, "a\n"), (1.25, "b\n"), (60.0, "c\n")]))
    assert [line.at_s for line in short] == [1.0, 1.25, 1.25 + record.IDLE_S]


def test_the_picture_is_xml_and_shows_each_line_from_its_instant_on(record: ModuleType) -> None:
    written = record.lines([(float(i), f"<line {i}> & more\n") for i in range(record.ROWS + 4)])
    root = ET.fromstring(record.svg(written, "a & b"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["a & b", *(f"<line {i}> & more" for i in range(record.ROWS + 4))]
    style = root.findtext("{http://www.w3.org/2000/svg}style") or ""
    total_s = written[-1].at_s + record.HOLD_S
    assert f"@keyframes l7{{0%{{opacity:0}}{700 / total_s:.3f}%,to{{opacity:1}}}}" in style
    assert style.count("translateY") == 4 + 2  # one for each line beyond the screen, and twice the end


def test_a_command_is_recorded_with_its_exit_code(record: ModuleType) -> None:
    program = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns); sys.exit(3)"
    chunks, code = record.record([sys.executable, "-c", program])
    assert code == 3
    assert "".join(text for _, text in chunks).strip() == f"True {record.COLUMNS}"
