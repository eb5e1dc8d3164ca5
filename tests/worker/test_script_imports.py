"""Which of a script's imports the zygote does ahead: leading ones of installed modules, none of the job's own."""

from __future__ import annotations

import pathlib
import sys

import pytest

from elastic.worker.boot import zygote
from elastic.worker.boot.script_imports import preloads


def found(folder: pathlib.Path, text: str, *skip: str) -> list[str]:
    (folder / "train.py").write_text(text)
    return list(preloads(["train.py"], str(folder), skip))


def test_leading_imports_of_installed_modules(tmp_path: pathlib.Path) -> None:
    text = '''"""What it does."""
from __future__ import annotations
import json, torch
import xml.dom as d
from numpy import array
try:
    import elastic
except ImportError: pass
import csv
'''
    assert found(tmp_path, text) == ["json", "torch", "xml.dom", "numpy", "csv"]


@pytest.mark.parametrize(
    "statement",
    [
        "import os\nos.environ['HF_HOME'] = '/x'",
        "x = 1",
        "if True:\n    import abc",
        "print()",
        "import mine",
        "import absent",
        "from . import other",
    ],
)
def test_nothing_behind_another_statement(tmp_path: pathlib.Path, statement: str) -> None:
    """It may be meant for the imports that follow."""
    (tmp_path / "mine.py").write_text("")
    assert "csv" not in found(tmp_path, f"import json\n{statement}\nimport csv\n")


def test_preload_skips_the_listed_modules(tmp_path: pathlib.Path) -> None:
    text = "import json\nimport xml.dom\nimport csv\n"
    assert found(tmp_path, text, "xml", "csv") == ["json"]
    assert found(tmp_path, text, "xml.dom") == ["json", "csv"]
    assert found(tmp_path, text, "*") == []


@pytest.mark.parametrize("text", ["import (", "import json\0"])
def test_preload_of_an_unreadable_script_is_empty(tmp_path: pathlib.Path, text: str) -> None:
    assert found(tmp_path, text) == []
    assert list(preloads(["absent.py"], str(tmp_path), ())) == []
    assert list(preloads([], str(tmp_path), ())) == []


def test_of_a_module(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "train.py").write_text("import csv\n")
    (package / "__main__.py").write_text("import json\n")
    assert list(preloads(["-m", "pkg.train"], str(tmp_path), ())) == ["csv"]
    assert list(preloads(["-m", "pkg"], str(tmp_path), ())) == ["json"]
    assert list(preloads(["-m", "pkg.absent"], str(tmp_path), ())) == []
    assert list(preloads(["-m", "absent.train"], str(tmp_path), ())) == []
    assert next(iter(preloads(["-m", "timeit"], str(tmp_path), ()))) == "gc"


def test_integrations_are_imported_ahead_and_elastic_is_not(tmp_path: pathlib.Path) -> None:
    """elastic itself is there; an integration brings its framework, which takes seconds."""
    text = "import elastic\nfrom elastic.integrations.transformers import Trainer\nimport elastic.worker\nimport csv\n"
    assert found(tmp_path, text) == ["elastic.integrations.transformers", "csv"]
    assert found(tmp_path, text, "elastic.integrations.transformers") == ["csv"]


def test_preload_asks_for_the_names_that_a_script_imports(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text("import json\nfrom json import dumps, loads as read\nfrom csv import *\n")
    assert preloads(["train.py"], str(tmp_path), ()) == {"json": ("dumps", "loads"), "csv": ()}


def test_the_zygote_loads_what_a_package_loads_for_a_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `import transformers` does, which imports a model's code when its name is asked for."""
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib\ndef __getattr__(name):\n"
        "    return getattr(importlib.import_module('lazily.part'), name) if name == 'Part' else 1 / 0\n"
    )
    (package / "part.py").write_text("class Part: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    problems, _ = zygote._import(["lazily"], {})
    assert "lazily.part" not in sys.modules
    problems, _ = zygote._import(["lazily"], {"lazily": ("Part",)})
    assert not problems
    assert sys.modules.pop("lazily.part")
    del sys.modules["lazily"]
