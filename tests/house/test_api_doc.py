"""The generated pages are as the code is."""

from __future__ import annotations

from support import api_doc, reference_doc


def test_the_tables_of_fields_are_those_of_the_code() -> None:
    assert api_doc.PAGE.read_text() == api_doc.page(), "rewrite them: PYTHONPATH=tests python -m support.api_doc"


def test_every_table_has_its_fields() -> None:
    made = api_doc.tables()
    for line in ("### A job in full", "| `class` | text |", "| `checkpoint` | [Checkpoint](#checkpoint), or null |"):
        assert line in made


def test_the_pages_of_commands_and_fields_are_those_of_the_code() -> None:
    for path, text in reference_doc.pages().items():
        assert path.read_text() == text, f"{path.name}: rewrite it: PYTHONPATH=tests python -m support.reference_doc"
        assert text.count("\n| ") > 20
