"""A batch system ends its allocations at a known time: its prolog or a warning signal's handler writes that time, in
seconds since the epoch, into a file, and elasticd drains the node before.

    preemption = "batch"
    preemption_url = "file:///run/batch/ends"
"""

from pathlib import Path
from urllib.parse import urlsplit

from elasticd.plugins import Notice, NoticeUnknown


class EndFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def look(self, now_wall_s: float) -> Notice | None:
        try:
            ends_wall_s = float(self.path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # such as half a file: asked again in 5 s
            raise NoticeUnknown(f"{self.path}: {error}") from error
        return Notice("its allocation ends", ends_wall_s - now_wall_s)


def source(url: str) -> EndFile:
    return EndFile(Path(urlsplit(url).path or "/run/batch/ends"))
