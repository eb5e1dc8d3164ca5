"""What stays of a long text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.texts import ONE_LINE_CHARS, cut_middle, one_line


@given(text=st.text(max_size=40), most=st.integers(1, 40))
def test_both_ends_of_a_longer_text_stay(text: str, most: int) -> None:
    cut = cut_middle(text, most)
    if len(text) <= most:
        assert cut == text
        return
    head, _, tail = cut.partition("…") if "…" not in text else (cut, "", "")
    assert len(cut) == most
    assert text.startswith(head) or "…" in text
    assert text.endswith(tail)


def test_lines_of_a_message_are_joined_and_its_ends_are_kept() -> None:
    assert one_line("TypeError: Layout(\n  'cpu',\n\n  size=[4],\n)") == "TypeError: Layout( 'cpu', size=[4], )"
    long = one_line("RuntimeError: Caught KeyError\n" + "  File x\n" * 200 + "KeyError: 'label'")
    assert len(long) == ONE_LINE_CHARS
    assert long.startswith("RuntimeError: Caught KeyError File x")
    assert long.endswith("File x KeyError: 'label'")
