"""The commands of the documents, as they stand there, for tests that run them."""

from __future__ import annotations

import re
import textwrap

from .source import ROOT


def section(page: str, heading: str = "") -> str:
    """The text of `page` below `heading` ('## etcd'), to the next heading of the same or a higher level; without
    `heading`, the text before the first one of the second level."""
    text = (ROOT / page).read_text()
    if not heading:
        return text.partition("\n## ")[0]
    assert text.count(f"\n{heading}\n") == 1, f"{page} has no {heading!r}"
    text = text.partition(f"\n{heading}\n")[2]
    fences = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)  # a comment in a file is no heading
    hidden = fences.sub(lambda found: found[0].replace("#", "-"), text)
    end = re.search(rf"^#{{1,{len(heading) - len(heading.lstrip('#'))}}} ", hidden, re.MULTILINE)
    return text[: end.start()] if end else text


def indented(text: str) -> list[str]:
    """The code blocks of `text` that are indented by four spaces."""
    found = re.findall(r"(?:^|\n\n)((?:    .*\n|\n(?=    ))+)", text)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found]


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def uncommented(text: str) -> str:
    """Without the remarks behind its lines."""
    return re.sub(r"[ \t]+# .*$", "", text, flags=re.MULTILINE)
