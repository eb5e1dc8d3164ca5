"""The records behind the figures that README and docs quote: made, and checked.

    make evidence                                    # run all, and write docs/evidence/NAME.json
    make evidence-check                              # exit 1: a quoted figure is not its record's, or a record is stale
    python benchmarks/evidence.py [NAME …]           # some of them
    python benchmarks/evidence.py --quote            # write the records' values into the pages, with the digits there
    python benchmarks/evidence.py --check --again    # also run the stale ones, and say by how much they differ now

A page quotes a figure by a comment behind it, which no reader sees: `0.37 s<!-- recovery.kill_median_s -->`. It must be
the record's value, rounded to the digits that are written. A record is stale when the code that it measures has changed
since: by its syntax, so that a comment or a docstring is no change.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from _harness import HERE, SMOKE, ended, machine

ROOT = HERE.parent
RECORDS = ROOT / "docs" / "evidence"
LIMIT_S = 3600
RECOVERY = (
    *(f"elastic/{part}/**/*.py" for part in ("agent", "checkpoint", "contract", "etcd", "recovery", "util", "worker")),
    *(f"daemon/{part}/**/*.py" for part in ("agents", "cluster", "machine/processes", "node")),
)
"""What takes part in the recovery of a job: not what shows it."""
QUOTE = re.compile(r"([\d][\d.,]*)[^\d<]*<!-- ([a-z_]+)\.([\w./ ,'-]+?) -->")


@dataclass(frozen=True)
class Benchmark:
    arguments: tuple[str, ...] = ()
    measures: tuple[str, ...] = RECOVERY
    """Globs of the code whose change makes its figures stale, beside its own."""
    again: tuple[str, ...] | None = None
    """The arguments of a run that says how much the figures differ now; None: the same."""
    tolerance: float = 0.5
    """Relative difference of such a run that is no contradiction."""


BENCHMARKS = {
    "commit": Benchmark((), ("elastic/worker/**/*.py",)),
    "compared": Benchmark(again=("--quick",)),
    "faults": Benchmark(("--quick",)),
    "overhead": Benchmark(("--quick",), ("elastic/worker/**/*.py", "elastic/checkpoint/**/*.py")),
    "recovery": Benchmark(("--quick",)),
    "sharded": Benchmark(("--quick",)),
    "scale": Benchmark(
        ("--max", "1000"), ("elastic/agent/**/*.py", "elastic/recovery/**/*.py", "elastic/etcd/**/*.py")
    ),
    "state": Benchmark((), ("elastic/worker/state/**/*.py", "elastic/checkpoint/**/*.py")),
    "thousand_kills": Benchmark(("--plot", "docs/losses.svg"), again=("--quick",)),
}


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────


def digest(name: str) -> str:
    """Of the syntax of what the benchmark measures and of itself, without docstrings."""
    whole = hashlib.sha256()
    for pattern in (*BENCHMARKS[name].measures, f"benchmarks/{name}.py"):
        for path in sorted(ROOT.glob(pattern)):
            whole.update(f"{path.relative_to(ROOT)}\0{syntax(path.read_text())}\0".encode())
    return whole.hexdigest()[:32]


def syntax(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(tree)


def measure(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run it; returns its last line. Raises CalledProcessError, TimeoutExpired."""
    argv = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            output, _ = child.communicate(timeout=LIMIT_S)
        finally:
            child.terminate()  # which ends its cluster, too
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, argv, output)
    return dict(json.loads(output.splitlines()[-1]))


def commit() -> str:
    """What is checked out, with '-dirty' where it was changed since; records that were made with it are no change."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORDS.relative_to(ROOT)}")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def write(name: str) -> None:
    arguments, before, of = BENCHMARKS[name].arguments, machine(), commit()
    began_s = time.monotonic()
    figures = measure(name, arguments)
    record = {
        "command": " ".join(["python", f"benchmarks/{name}.py", *arguments]),
        "commit": of,
        "measured": digest(name),
        "date": time.strftime("%Y-%m-%d"),
        "took_s": round(time.monotonic() - began_s),
        "machine": before,
        "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch")},
        "figures": figures,
    }
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def records() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


# ── quotes ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Quote:
    page: str
    written: str
    record: str
    figure: str


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def quotes(page: str, text: str) -> Iterator[Quote]:
    for match in QUOTE.finditer(text):
        yield Quote(page, match[1].rstrip(".,"), match[2], match[3])


def wrong(quote: Quote, made: dict[str, dict[str, Any]]) -> str:
    """Why the quote is not what its record says; empty: it is."""
    value = figure(made.get(quote.record, {}).get("figures", {}), quote.figure)
    if value is None:
        return f"{quote.page}: {quote.record}.{quote.figure}: there is no such figure in docs/evidence"
    digits = len(quote.written.partition(".")[2])
    if f"{value:,.{digits}f}" != quote.written and f"{value:.{digits}f}" != quote.written:
        return f"{quote.page}: {quote.written} is quoted, {quote.record}.{quote.figure} is {value}"
    return ""


def figure(figures: Any, name: str) -> float | None:
    """`a.b` is that of b in a, `a.least` and `a.most` those of a list; None: there is no such number."""
    for key in name.split("."):
        if isinstance(figures, list) and key in ("least", "most"):
            figures = {"least": min(figures), "most": max(figures)}
        figures = figures.get(key) if isinstance(figures, dict) else None
    return figures if isinstance(figures, int | float) else None


def quoted(text: str, made: dict[str, dict[str, Any]]) -> str:
    """A page's text, with the values of the records in place of the figures that it quotes."""

    def now(match: re.Match[str]) -> str:
        value = figure(made.get(match[2], {}).get("figures", {}), match[3])
        if value is None:
            return match[0]
        written = match[1].rstrip(".,")
        digits = len(written.partition(".")[2])
        return f"{value:{',' if ',' in written else ''}.{digits}f}" + match[0][len(written) :]

    return QUOTE.sub(now, text)


def check(again: bool) -> int:
    made = records()
    found = [quote for path in pages() for quote in quotes(str(path.relative_to(ROOT)), path.read_text())]
    problems = [problem for quote in found if (problem := wrong(quote, made))]
    for name, record in made.items():
        quoted = [quote for quote in found if quote.record == name]
        fresh = record["measured"] == digest(name)
        print(f"{name}: {record['date']}, commit {record['commit']}, {len(quoted)} figures quoted", end="")
        print("" if fresh else "; what it measures has changed since", flush=True)
        if not fresh and quoted:
            problems.append(f"{name} is stale: python benchmarks/evidence.py {name}")
            if again:
                problems += differences(name, record["figures"], quoted)
    print("\n".join(problems))
    return 1 if problems else 0


def differences(name: str, before: dict[str, Any], quoted: Sequence[Quote]) -> Iterator[str]:
    benchmark = BENCHMARKS[name]
    now, tolerance = (
        measure(name, benchmark.arguments if benchmark.again is None else benchmark.again),
        benchmark.tolerance,
    )
    for key in sorted({quote.figure for quote in quoted}):
        old, new = figure(before, key), figure(now, key)
        if old and new is not None:
            change = new / old - 1
            print(f"  {key}: {old} then, {new} now, {change:+.0%}")
            if abs(change) > tolerance:
                yield f"{name}.{key}: {change:+.0%}, more than the tolerance of {tolerance:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", choices=[*BENCHMARKS, []], help="default: all")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quote", action="store_true")
    parser.add_argument("--quick", action="store_true", help="as --check: nothing is measured")
    parser.add_argument("--smoke", action="store_true", help=SMOKE)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, ended)
    if options.quick or options.smoke:
        print(json.dumps({"records": len(records()), "wrong": check(False)}))
    elif options.quote:
        for page in pages():
            page.write_text(quoted(page.read_text(), records()))
        subprocess.run([sys.executable, ROOT / "benchmarks" / "goodput.py"], check=True)  # its plot is made of a record
    elif options.check:
        sys.exit(check(options.again))
    else:
        for name in options.name or BENCHMARKS:
            print(f"== {name}", file=sys.stderr, flush=True)
            write(name)


if __name__ == "__main__":
    main()
