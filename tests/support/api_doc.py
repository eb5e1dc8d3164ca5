"""The tables of fields in docs/api.md, made from the API's classes: `PYTHONPATH=tests python -m support.api_doc`
rewrites them there. The text below a field's definition is what the table says of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from support.source import ROOT

SOURCES = [ROOT / "daemon" / "base" / f"{name}.py" for name in ("answers", "command_answers")]
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- fields: made by tests/support/api_doc.py -->", "<!-- end of fields -->"
PLAIN = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "any", "None": "null"}


def tables() -> str:
    nodes = [node for source in SOURCES for node in ast.parse(source.read_text()).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    titles = {each.name: _title(each) for each in classes}
    return "\n".join(line for each in classes if each.name != "Answer" for line in _table(each, titles))


def _title(made: ast.ClassDef) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", made.name).capitalize()
    return (ast.get_docstring(made) or words).partition("\n")[0].rstrip(".")


def _table(made: ast.ClassDef, titles: dict[str, str]) -> Iterator[str]:
    yield f"\n### {titles[made.name]}\n"
    if (parent := ast.unparse(made.bases[0])) != "Answer":
        yield f"The fields of [{titles[parent]}](#{_anchor(titles[parent])}), and:\n"
    yield "| field | value | meaning |\n|---|---|---|"
    for node, after in zip(made.body, [*made.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = {"cls": "class"}.get(node.target.id, node.target.id)
            yield f"| `{name}` | {_value(node.annotation, titles)} | {_text(after)} |"


def _text(after: ast.stmt | None) -> str:
    """The string below a field; '' if there is none."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return " ".join(after.value.value.split()).replace("|", "\\|")
    return ""


def _value(node: ast.expr, titles: dict[str, str]) -> str:
    match node:
        case ast.BinOp(left=left, right=right):
            return f"{_value(left, titles)}, or {_value(right, titles)}"
        case ast.Subscript(value=ast.Name(id="list"), slice=each):
            return f"list of {_value(each, titles)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, each])):
            return f"{_value(key, titles)} → {_value(each, titles)}"
    name = ast.unparse(node)
    return PLAIN.get(name) or f"[{titles[name]}](#{_anchor(titles[name])})"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """The page with its tables as they should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
