"""Record a command that runs in a terminal as an animated SVG: make recording, or
python examples/record.py docs/kill.svg -- python examples/demo.py --kill

The picture has the command's own output with its own timing; pauses are shortened to IDLE_S, and it says so. It is
text, plays in any browser without a script, repeats, and stands still at its end for readers who want no motion.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pathlib
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLUMNS, ROWS = 100, 26
IDLE_S, HOLD_S = 1.5, 5.0
"""A longer pause is shortened to this; how long the end stands before it starts again."""
CELL, LINE, SIZE, EDGE, TITLE = 8.2, 18, 13.5, 14, 30
"""In pixels: a character's width, a line's height, the font's size, the margin, the bar above."""
COLOURS = {31: "#ff7b72", 32: "#7ee787", 33: "#e3b341", 34: "#79c0ff", 35: "#d2a8ff", 36: "#76e3ea"}
PLAIN, DIM = "#e6edf3", "#8b949e"
ESCAPE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")


@dataclass(frozen=True)
class Piece:
    """Text of one style."""

    text: str
    column: int
    colour: str = PLAIN
    bold: bool = False


@dataclass(frozen=True)
class Line:
    at_s: float
    pieces: tuple[Piece, ...]


def record(command: Sequence[str]) -> tuple[list[tuple[float, str]], int]:
    """What the command writes to a terminal of its own, with instants from its start, and its exit code."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    began_s = time.monotonic()
    chunks = []
    while True:
        try:
            raw = os.read(terminal, 65536)
        except OSError:  # EIO: the last process has closed it
            break
        if not raw:
            break
        chunks.append((time.monotonic() - began_s, raw.decode(errors="replace")))
    os.close(terminal)
    return chunks, process.wait()


def lines(chunks: Iterable[tuple[float, str]]) -> list[Line]:
    """The lines that were written, each with the instant of its end. Raises ValueError for a program that moves the
    cursor."""
    found, text = [], ""
    style: dict[str, object] = {"colour": PLAIN, "bold": False}
    for at_s, chunk in chunks:
        text += chunk
        while "\n" in text:
            line, _, text = text.partition("\n")
            found.append(Line(at_s, _pieces(line.rstrip("\r"), style)))
    return found


def _pieces(line: str, style: dict[str, object]) -> tuple[Piece, ...]:
    """`style` goes on from line to line."""
    pieces, column, at = [], 0, 0
    for match in [*ESCAPE.finditer(line), None]:
        text = line[at : match.start() if match else len(line)]
        if "\x1b" in text or "\r" in text:
            raise ValueError(f"only colours are drawn: {line!r}")
        if text.strip():
            pieces.append(Piece(text, column, str(style["colour"]), bool(style["bold"])))
        column += len(text)
        if match:
            at = match.end()
            if match.group(2) != "m":
                raise ValueError(f"only colours are drawn: {line!r}")
            for code in (int(number or 0) for number in match.group(1).split(";")):
                if code == 0:
                    style |= {"colour": PLAIN, "bold": False}
                elif code == 1:
                    style["bold"] = True
                elif code == 2:
                    style["colour"] = DIM
                elif code in COLOURS or code - 60 in COLOURS:
                    style["colour"] = COLOURS[code if code in COLOURS else code - 60]
    return tuple(pieces)


def without_pauses(written: Sequence[Line]) -> list[Line]:
    """The same, no two further apart than IDLE_S."""
    found: list[Line] = []
    now_s = last_s = 0.0
    for line in written:
        now_s += min(line.at_s - last_s, IDLE_S)
        last_s = line.at_s
        found.append(Line(now_s, line.pieces))
    return found


def svg(written: Sequence[Line], title: str) -> str:
    """The animation. Without animation it shows the end."""
    total_s = written[-1].at_s + HOLD_S
    width, height = COLUMNS * CELL + 2 * EDGE, ROWS * LINE + TITLE + EDGE
    styles, drawn, scrolls = [], [], ["0%{transform:none}"]
    for number, line in enumerate(written):
        percent = 100 * line.at_s / total_s
        y = TITLE + (number + 1) * LINE - 4
        if number >= ROWS:
            scrolls.append(f"{percent:.3f}%{{transform:translateY({-(number + 1 - ROWS) * LINE}px)}}")
        if not line.pieces:
            continue
        styles.append(f"@keyframes l{number}{{0%{{opacity:0}}{percent:.3f}%,to{{opacity:1}}}}")
        texts = "".join(_drawn(piece, y) for piece in line.pieces)
        drawn.append(f'<g style="animation-name:l{number}">{texts}</g>')
    end = f"translateY({-max(0, len(written) - ROWS) * LINE}px)"
    scrolls.append(f"to{{transform:{end}}}")
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="15" r="5" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    box = f"0 0 {width:.0f} {height}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">
<title>{escape(title)}</title>
<style>
text{{font:{SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:{PLAIN}}}
.b{{font-weight:bold}}
#all,#all g{{animation:scroll {total_s:.2f}s step-end infinite}}
#all{{transform:{end}}}
@media (prefers-reduced-motion:reduce){{#all,#all g{{animation:none}}}}
@keyframes scroll{{{"".join(scrolls)}}}
{chr(10).join(styles)}
</style>
<clipPath id="screen"><rect y="{TITLE}" width="{width:.0f}" height="{height - TITLE}"/></clipPath>
<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>
{dots}<text x="{width / 2:.0f}" y="19" text-anchor="middle" style="fill:{DIM}">{escape(title)}</text>
<g clip-path="url(#screen)"><g id="all">
{chr(10).join(drawn)}
</g></g>
</svg>
"""


def _drawn(piece: Piece, y: int) -> str:
    """Its words, with their places and lengths, so that columns stand below each other in any font."""
    style = ' class="b"' if piece.bold else ""
    style += "" if piece.colour == PLAIN else f' style="fill:{piece.colour}"'
    return "".join(
        f'<text x="{EDGE + (piece.column + words.start()) * CELL:.1f}" y="{y}" '
        f'textLength="{len(words.group()) * CELL:.1f}"{style}>{escape(words.group())}</text>'
        for words in re.finditer(r"\S+(?: \S+)*", piece.text)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--shown", default="", help="the command as the picture shows it")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    shown = args.shown or shlex.join(args.command)
    chunks, code = record(args.command)
    if code:
        print("".join(text for _, text in chunks), file=sys.stderr)
        print(f"{shown} has ended with code {code}: nothing is recorded", file=sys.stderr)
        return code
    typed = Line(0.0, (Piece("$", 0, DIM), Piece(shown, 2, bold=True)))
    written = [typed, *without_pauses(lines(chunks))]
    args.file.write_text(svg(written, f"{shown}: recorded, pauses over {IDLE_S:g} s shortened"))
    print(f"{args.file}: {len(written)} lines, {written[-1].at_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
