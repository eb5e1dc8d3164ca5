"""Settings explain themselves, modules say what they are, and nothing points outside the repository."""

from __future__ import annotations

import ast
import re

from support.source import ROOT, modules, tracked, tree, where

SETTINGS = ("elasticd.base.settings", "elastic.contract.job.spec", "elastic.contract.timeouts")
"""Modules whose every field is a setting that people write."""

EXEMPT = {
    *("JobSpec.checkpoint", "JobSpec.restarts", "JobSpec.hang", "JobSpec.limits", "JobSpec.debug"),
    *("Settings.etcd", "Settings.http", "Settings.timeouts", "Settings.run_as", "Settings.retention"),
    *("Settings.page", "Settings.notify", "Settings.per_user"),
}
"""Tables: their own fields are documented."""


def undocumented(module: ast.Module) -> list[str]:
    """Class.field of each annotated class attribute that no doc string follows."""
    found = []
    for cls in (n for n in ast.walk(module) if isinstance(n, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if not doc and not field.target.id.startswith("_") and "ClassVar" not in ast.unparse(field.annotation):
                    found.append(f"{cls.name}.{field.target.id}")
    return found


def test_every_setting_is_documented() -> None:
    assert {field for name in SETTINGS for field in undocumented(tree(modules()[name]))} <= EXEMPT


def test_the_check_of_settings_sees_a_bare_field() -> None:
    source = 'class S:\n    a: int = 1\n    """Documented."""\n    b: int = 2\n    c: int\n    """Yes."""\n'
    assert undocumented(ast.parse(source)) == ["S.b"]


def test_every_module_has_a_docstring() -> None:
    assert not [where(path) for path in modules().values() if not ast.get_docstring(tree(path))]


_OUTSIDE = re.compile(
    "|".join(
        [
            r"\.\./sha" r"red", r"/wo" r"rk/", r"/ho" r"me/[a-z]", r"/Us" r"ers/", r"\bFA" r"CTS\b", r"\bSTY" r"LE\.md",
            r"\bDES" r"IGN\b", r"/tmp/" r"brief", r"\bissues " r"show\b", r"house-" r"example",
            r"(?i:\bcla" r"ude\b|\banthro" r"pic\b|\bchat" r"gpt\b)",
        ]
    )
)  # fmt: skip
"""Paths of one machine, papers that are not in the repository, tools of its authors."""


def test_nothing_points_outside_the_repository() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := _OUTSIDE.search(line):
                found.append(f"{where(path)}:{number}: {match[0]!r} in {line.strip()[:100]!r}")
    assert not found, "\n".join(found)


def _pages() -> list[str]:
    return sorted(where(p) for p in tracked() if p.suffix == ".md")


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_commands_of_a_page_exist() -> None:
    named = {
        (page, target)
        for page in _pages()
        for target in re.findall(r"(?:^ {4}|^\$ |`)make ([a-z][a-z-]*)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert not [(page, target) for page, target in named if target not in _targets()], "the Makefile lacks them"


def test_the_links_of_a_page_lead_somewhere() -> None:
    dead = []
    for page in _pages():
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
        dead += [(page, x) for x in links if x and "://" not in x and not ((ROOT / page).parent / x).exists()]
    assert not dead
