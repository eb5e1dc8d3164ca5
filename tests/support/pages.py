"""What a browser would see in a page, and a text that tries to become a part of it."""

from __future__ import annotations

import html.parser

EVIL = '<script>alert("x")</script><img src=//evil/a.png onerror=y>\x1b[31m'


class Seen(html.parser.HTMLParser):
    """Names of all elements and attributes, and the texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.texts).split())
