"""Whether a process that died of SIGKILL was killed by the kernel's out-of-memory killer."""

from __future__ import annotations

from elastic.util.processes import kernel_file

VMSTAT = "/proc/vmstat"
LOOK_S = 1.0
"""Minimum interval between two reads of the kernel's count."""


class OomWatch:
    """The kernel counts its out-of-memory kills, of any cgroup and of the machine as a whole; which processes they were
    is only in a log that few users may read. So this checks whether the count rose within the last seconds."""

    def __init__(self, vmstat: str = VMSTAT) -> None:
        self._vmstat = vmstat
        self._before = self._recent = self._read()
        self._looked_s = float("-inf")

    def look(self, now_s: float) -> None:
        """To be called often; reads at most once per LOOK_S."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._before, self._recent = self._recent, self._read()

    def struck(self) -> bool:
        """Whether the kernel has killed since the read before the last: one to two times LOOK_S ago."""
        return self._read() > self._before

    def _read(self) -> int:
        try:
            _, _, rest = kernel_file(self._vmstat).partition(b"\noom_kill ")
        except OSError:  # no descriptors, or no /proc: the count is not known
            return 0
        count = rest.partition(b"\n")[0]
        return int(count) if count.isdigit() else 0
