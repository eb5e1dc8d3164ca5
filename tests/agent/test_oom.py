"""Whether the kernel's out-of-memory killer was at work: told by its count."""

from __future__ import annotations

from pathlib import Path

from elastic.agent.workers.process import LOOK_S, OomWatch


def test_only_a_kill_of_the_last_moments_counts(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 3\npgfault 77\n")
    watch = OomWatch(str(vmstat))
    watch.look(0.0)
    assert not watch.struck(), "those of before we began"
    vmstat.write_text("nr_free_pages 5\noom_kill 4\npgfault 78\n")
    watch.look(LOOK_S)
    assert watch.struck(), "also when a look came between the kill and its being noticed"
    watch.look(1.5 * LOOK_S)
    assert watch.struck(), "a look too soon is none"
    watch.look(2 * LOOK_S)
    assert not watch.struck(), "long ago"


def test_a_kernel_that_does_not_count_has_killed_nobody(tmp_path: Path) -> None:
    watch = OomWatch(str(tmp_path / "nothing"))
    watch.look(0.0)
    assert not watch.struck()
