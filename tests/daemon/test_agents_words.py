"""The last line of an agent's log, as a status shows it."""

from __future__ import annotations

import pytest

from elasticd.agents.agents import last_words


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event": "agent.cannot_start", "error": "etcd: deadline exceeded", "level": "error"}',
         "etcd: deadline exceeded"),
        ('{"event": "thread.failed", "exception": "Traceback (most recent call last):\\n  x\\nOSError: no"}',
         "OSError: no"),
        ('{"event": "agent.starts", "pid": 7}', "agent.starts"),
        ("Segmentation fault", "Segmentation fault"),
        ('["not", "an", "object"]', '["not", "an", "object"]'),
        ("{}", "{}"),
        ('{"event":' + "[" * 1900, "[" * 300),
    ],
)  # fmt: skip
def test_last_words_are_the_error_without_the_json_around_it(line: str, said: str) -> None:
    assert last_words(line) == said
