"""All public names with their signatures, read from the source: `tests/house/public_names.txt`, written anew by
`make golden`. Nothing is imported: the frameworks are not there, and the text is the same under each Python."""

from __future__ import annotations

import ast
import copy
import re
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

from support.source import ROOT, modules, tree

PAGE = ROOT / "tests" / "house" / "public_names.txt"
REFERENCE = ROOT / "docs" / "reference.md"
TITLE = "# All public names with their signatures (make golden). A line that changes here is a change for users."
PLACES = (
    "elastic",
    "elastic.testing",
    "elastic.integrations.transformers",
    "elastic.integrations.accelerate",
    "elastic.integrations.lightning",
    "elasticd.plugins",
)
"""Modules whose `__all__` are the public names."""
_MADE_BY_ELASTIC = ("elastic.Job", "elastic.testing.Job", "elastic.testing.Node")
"""Whose `__init__` is not public."""
_PROTOCOL = ("__init__", "__iter__", "__len__", "__enter__", "__exit__")


class Found(NamedTuple):
    """Where a name is defined."""

    module: str
    node: ast.stmt
    """A class, a function or an assignment; the import of what is not ours."""


class Documented(NamedTuple):
    """A name in docs/reference.md."""

    name: str
    """With the module that a script imports it from."""
    members: tuple[str, ...] | None
    """The public ones; None: all whose name is public."""


def documented() -> dict[str, Documented]:
    """Where it is defined -> what docs/reference.md has of it."""
    found = {}
    for block in REFERENCE.read_text().split("\n::: ")[1:]:
        home, heading = block.split()[0], re.search(r"heading: ([\w.]+)", block)
        assert heading is not None, f"{REFERENCE.name}: {home} has no heading"
        members = re.search(r"members: \[([^]]*)\]", block)
        name = heading[1] if "." in heading[1] else f"elastic.{heading[1]}"
        found[home] = Documented(name, tuple(re.findall(r"\w+", members[1])) if members else None)
    return found


def exported(module: str) -> list[str]:
    """Its `__all__`."""
    for node in tree(modules()[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def page() -> str:
    known, lines, aliases = documented(), [TITLE], dict[str, str]()
    for module in PLACES:
        for name in exported(module):
            lines += ["", *_described(module, name, known, aliases)]
    return "\n".join([*lines, "", *sorted(aliases.values()), "", *_outside(), ""])


def _described(module: str, name: str, known: dict[str, Documented], aliases: dict[str, str]) -> Iterator[str]:
    """`aliases` gets those that signatures name."""
    full, found = f"{module}.{name}", definition(module, name)
    assert found is not None, f"{full} is nowhere"
    match found.node:
        case ast.ClassDef() as made:
            bases = ", ".join(ast.unparse(each) for each in (*made.bases, *made.keywords))
            yield f"{_decorated(made)}class {full}{f'({bases})' if bases else ''}"
            shown = known.get(f"{found.module}.{made.name}")
            for what, lines in _members(found, shown.members if shown else None, aliases).items():
                if (what, full in _MADE_BY_ELASTIC) != ("__init__", True):
                    yield from (f"    {line}" for line in lines)
        case ast.FunctionDef() as made:
            yield from _function(full, Found(found.module, made), aliases)
        case ast.ImportFrom() as made:
            yield f"{full}: {name} of {made.module}"
        case ast.Assign() as made:
            hidden = name == "__version__"
            yield f"{full} = {'…' if hidden else ast.unparse(made.value)}"


def _outside() -> Iterator[str]:
    """What is called by name from outside Python: commands, `python -m`, entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    docs = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    run = [name.removesuffix(".__main__") for name in modules() if name.endswith(".__main__")]
    yield from (f"command {name}" for name in sorted(project["scripts"]))
    yield from (f"python -m {name}" for name in run if re.search(rf"-m {re.escape(name)}(?![\w.])", docs))
    for group, points in sorted(project["entry-points"].items()):
        yield f"entry points {group}: {', '.join(sorted(points))}"
    groups = definition("elasticd.base.entry_points", "GROUPS")
    assert groups is not None
    assert isinstance(groups.node, ast.Assign)
    for setting, group in ast.literal_eval(groups.node.value).items():
        yield f"entry points {group}: any, for the setting {setting}"


# ── where a name is defined ─────────────────────────────────────────────────────────────────────────────────


def definition(module: str, name: str) -> Found | None:
    """Of a name that `module` has, as `x` or `x.y`; None: it is a builtin, or a module."""
    first, _, rest = name.partition(".")
    for node in _statements(tree(modules()[module]).body):
        match node:
            case ast.ClassDef(name=there) | ast.FunctionDef(name=there) if there == name:
                return Found(module, node)
            case ast.Assign() | ast.AnnAssign() if name in map(ast.unparse, _targets(node)):
                return Found(module, node)
            case ast.ImportFrom(names=names):
                for alias in names:
                    if (alias.asname or alias.name) == first:
                        home = _home(module, node)
                        if rest:
                            inner = f"{home}.{alias.name}"
                            return definition(inner, rest) if inner in modules() else None
                        return definition(home, alias.name) if home in modules() else Found(module, node)
    return None


def _home(module: str, node: ast.ImportFrom) -> str:
    """The module that it imports from."""
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*up, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those under `if TYPE_CHECKING` too."""
    for node in body:
        yield from _statements(node.body) if isinstance(node, ast.If) else [node]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets


# ── classes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _members(found: Found, wanted: tuple[str, ...] | None, aliases: dict[str, str]) -> dict[str, list[str]]:
    """Name -> lines, inherited ones too. `wanted`: which; None: all that are public."""
    there = _collected(found)
    if wanted is not None:
        absent = set(wanted) - set(there)
        assert not absent, f"{REFERENCE.name} names {absent}, which {ast.unparse(found.node)[:40]} has not"
        there = {name: there[name] for name in (*_PROTOCOL, *wanted) if name in there}
    return {name: list(_member(name, each, aliases)) for name, each in there.items()}


def _member(name: str, found: Found | None, aliases: dict[str, str]) -> Iterator[str]:
    if found is None:
        yield name
    elif isinstance(found.node, ast.FunctionDef):
        yield from _function(f"{_decorated(found.node)}{name}", found, aliases)
    else:
        yield ast.unparse(_resolved(found))


def _collected(found: Found) -> dict[str, Found | None]:
    there: dict[str, Found | None] = {}
    _collect(found, there)
    return there


def _collect(found: Found, there: dict[str, Found | None]) -> set[str]:
    """Public members; None for those that `__init__` sets. Returns those of the class alone (ClassVar)."""
    made, alone = found.node, set[str]()
    assert isinstance(made, ast.ClassDef)
    for base in reversed(made.bases):
        above = definition(found.module, ast.unparse(base))
        if above is not None and isinstance(above.node, ast.ClassDef):
            alone |= _collect(above, there)
    for node in _statements(made.body):
        match node:
            case ast.FunctionDef(name=name) if name in _PROTOCOL or not name.startswith("_"):
                there[name] = Found(found.module, node)
                if name == "__init__":
                    there |= {given: None for given in _given(node) if given not in there}
            case ast.Assign() | ast.AnnAssign():
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("ClassVar"):
                    alone.add(ast.unparse(node.target))
                for name in map(ast.unparse, _targets(node)):
                    if not name.startswith("_") and name not in alone:
                        there[name] = Found(found.module, node)
    return alone


def _given(init: ast.FunctionDef) -> Iterator[str]:
    """Public attributes that `__init__` sets."""
    for node in ast.walk(init):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not node.attr.startswith("_"):
            yield node.attr


def _decorated(made: ast.ClassDef | ast.FunctionDef) -> str:
    return "".join(f"@{ast.unparse(each)} " for each in made.decorator_list)


# ── functions ───────────────────────────────────────────────────────────────────────────────────────────────


def _function(name: str, found: Found, aliases: dict[str, str]) -> Iterator[str]:
    """Its signature, and what it takes as `**options`. `aliases` gets those that it names."""
    made, given = found.node, _resolved_arguments(found)
    assert isinstance(made, ast.FunctionDef)
    returned = f" -> {ast.unparse(made.returns)}" if made.returns else ""
    yield f"{name}({ast.unparse(given)}){returned}"
    yield from (f"    **options: {option}" for option in _options(found))
    for node in ast.walk(given):
        named = definition(found.module, ast.unparse(node)) if isinstance(node, ast.Name | ast.Attribute) else None
        if named is not None and isinstance(named.node, ast.Assign):
            aliases[ast.unparse(node)] = ast.unparse(named.node)


def _options(found: Found, given: frozenset[str] = frozenset()) -> Iterator[str]:
    """Of what it hands its `**options` to, if that is ours: the parameters that are not `given` on the way."""
    made = found.node
    assert isinstance(made, ast.FunctionDef)
    for call in ast.walk(made):
        if isinstance(call, ast.Call) and made.args.kwarg is not None:
            spread = [name for word in call.keywords if word.arg is None for name in ast.walk(word.value)]
            handed = any(isinstance(name, ast.Name) and name.id == made.args.kwarg.arg for name in spread)
            taker = _called(definition(found.module, ast.unparse(call.func)) if handed else None)
            if taker is not None:
                taken, known = _resolved_arguments(taker), given | {word.arg for word in call.keywords if word.arg}
                for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True):
                    if each.arg not in known:
                        yield ast.unparse(each) + (f" = {ast.unparse(default)}" if default is not None else "")
                yield from _options(taker, known)


def _called(found: Found | None) -> Found | None:
    """The function; of a class its `__init__`."""
    if found is not None and isinstance(found.node, ast.ClassDef):
        found = _collected(found).get("__init__")
    return found if found is not None and isinstance(found.node, ast.FunctionDef) else None


def _resolved_arguments(found: Found) -> ast.arguments:
    assert isinstance(found.node, ast.FunctionDef)
    given = copy.deepcopy(found.node.args)
    given.defaults = [_value(found.module, each) for each in given.defaults]
    given.kw_defaults = [each and _value(found.module, each) for each in given.kw_defaults]
    return given


def _resolved(found: Found) -> ast.stmt:
    """An assignment, with the value of a constant for its name."""
    node = copy.deepcopy(found.node)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        node.value = _value(found.module, node.value)
    return node


def _value(module: str, given: ast.expr) -> ast.expr:
    constant = definition(module, given.id) if isinstance(given, ast.Name) else None
    return constant.node.value if constant is not None and isinstance(constant.node, ast.Assign) else given
