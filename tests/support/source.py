"""The project's own source, read but not run: its modules, what they import, its tracked files."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import subprocess
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"elasticd": ROOT / "daemon", "elastic": ROOT / "elastic"}
"""Top-level import name -> its folder."""


@dataclass(frozen=True)
class Import:
    module: str
    """Absolute name; `from x import y` counts as x.y when that is one of our modules or x is `elastic`, else as x."""
    line: int
    eager: bool
    """Done when the module is imported: not inside a function, not under TYPE_CHECKING."""


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """Import name -> file, of every module that the distribution ships."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def where(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def imports(name: str) -> tuple[Import, ...]:
    """All imports of one of our modules, at any depth."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[Import] = []
    _walk(tree(path), package, True, found)
    return tuple(found)


def _walk(node: ast.AST, package: str, eager: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found += [Import(alias.name, child.lineno, eager) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*up, *([child.module] if child.module else [])])
            for alias in child.names:
                full = f"{base}.{alias.name}"
                found.append(Import(full if full in modules() or base == "elastic" else base, child.lineno, eager))
        else:
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            _walk(child, package, eager and not typing_only and not later, found)


@functools.cache
def tracked() -> tuple[pathlib.Path, ...]:
    """Files under version control; without git, every file outside the ignored folders."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
        return tuple(p for p in paths if p.is_file() and not p.is_symlink())
    ignored = {".venv", "build", "dist", "__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            f for f in folders if f not in ignored and not f.startswith(".venv-") and not f.endswith(".egg-info")
        ]
        found += [pathlib.Path(folder, f) for f in files if not pathlib.Path(folder, f).is_symlink()]
    return tuple(found)
