"""Makes the pictures in this folder, from made-up records, so that they change with the program only.

top.svg: `elasticctl top`; page.html: the live page of a job, as one moment of it; report.html: `elasticctl report`.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import msgspec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402
from support.snapshots import SPEC, job, row, snapshot  # noqa: E402

from elastic.contract.origin import Origin  # noqa: E402
from elastic.contract.records.job_records import (  # noqa: E402
    Cause,
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    JobState,
    Phase,
    ProgressRecord,
    SpecRecord,
    WorkerError,
)
from elastic.contract.records.ledger import Bucket, Ledger  # noqa: E402
from elastic.contract.records.reasons import Code, reason  # noqa: E402
from elasticd.api.page import live, report  # noqa: E402
from elasticd.api.views import views  # noqa: E402
from elasticd.base.answers import EtcdContact, History  # noqa: E402
from elasticd.base.command_answers import Top  # noqa: E402
from elasticd.cluster.cluster import Job  # noqa: E402
from elasticd.ctl.jobs import top  # noqa: E402

NOON_S = 1_764_000_000.0
LENGTH_S = 3600.0
NOW = views.Now(monotonic_s=LENGTH_S, wall_s=NOON_S + LENGTH_S)
WIDTH = 100
MILLIS = {
    Bucket.STEPPING: 14_020_000, Bucket.CHECKPOINT: 41_000, Bucket.DETECT: 9_000, Bucket.FORM: 21_000,
    Bucket.SYNC: 6_000, Bucket.WAITING: 220_000, Bucket.SETUP: 83_000,
}  # fmt: skip


def training() -> Job:
    """Four ranks on two nodes, an hour after the submission; a worker was killed, and a node lost for a minute."""
    places = tuple(
        GenerationNode(node=n, incarnation="i", host=f"10.0.0.{i}", slots=(0, 1)) for i, n in enumerate("ab", 1)
    )
    ranks = [
        row(rank, "ab"[rank // 2], rank % 2, 28_412 - (rank == 3), rss_mb=812.0 + 7 * rank, step_s=0.121 + 0.004 * rank,
            phase="exchanging" if rank < 3 else "computing")
        for rank in range(4)
    ]  # fmt: skip
    ledger = Ledger(
        until_ms=0, wall_ms=int(LENGTH_S * 1000), ranks_ms={bucket.value: ms for bucket, ms in MILLIS.items()}
    )
    progress = ProgressRecord(
        generation=4, world_size=4, step=28_412, steps_per_s=8.02, loss=0.3127, wall_s=NOW.wall_s - 1, ledger=ledger,
        checkpoint_step=28_200, checkpoint_wall_s=NOW.wall_s - 26, checkpoint_interval="every 30 s (auto)",
        managed=True, ranks=tuple(ranks),
    )  # fmt: skip
    spec = SpecRecord(
        spec=msgspec.structs.replace(SPEC, script="/data/train.py", args=("--lr", "3e-4"), nodes="1:2"),
        submitted_wall_s=NOON_S, submitted_by="ada", uid=1500, user="ada",
    )  # fmt: skip
    return job(
        spec=spec, progress=progress, incidents=incidents(), state=JobState(phase=Phase.RUNNING, restarts=2),
        generation=GenerationRecord(
            number=4, nodes=places, store_host="10.0.0.1", store_port=29400, leader="a", why="b joins"
        ),
    )  # fmt: skip


def incidents() -> tuple[IncidentRecord, ...]:
    died = WorkerError(
        node="b", slot=1, rank=3, message="killed by SIGKILL", traceback="", signal="SIGKILL", exit_code=-9, step=9_120
    )
    killed = Cause(
        generation=1, kind="exit", node="b", ranks=(3,), detail=reason(Code.OOM_KILLED, signal="SIGKILL"),
    )  # fmt: skip
    return (
        IncidentRecord(
            generation=2, kind="exit", node="b", ranks=(3,), detail=killed.detail, wall_s=NOON_S + 1130, step=9_120,
            timeline_s={"published": 0.012, "let_go": 0.031, "formed": 0.19, "synced": 0.21, "stepping": 0.288},
            steps_lost=0, steps_lost_at_most=0, world_size_before=4, world_size_after=4, restored_from="live",
            origin=Origin.LIVE, causes=(killed,), error=died,
        ),
        IncidentRecord(
            generation=3, kind="lost", node="b", ranks=(2, 3), detail="b is gone: its agent refuses connections",
            wall_s=NOON_S + 2200, step=17_655, timeline_s={"published": 3.1, "formed": 3.4, "stepping": 3.62},
            steps_lost=0, steps_lost_at_most=0, world_size_before=4, world_size_after=2, restored_from="live",
            origin=Origin.LIVE,
        ),
        IncidentRecord(
            generation=4, kind="planned", node="b", ranks=(), detail="b joins", wall_s=NOON_S + 2262, step=17_990,
            timeline_s={"published": 0.02, "formed": 0.22, "stepping": 0.41}, steps_lost=0, steps_lost_at_most=0,
            world_size_before=2, world_size_after=4, restored_from="live", origin=Origin.LIVE,
        ),
    )  # fmt: skip


def history() -> History:
    points = []
    for i in range(240):
        at_s = 90 + i * (LENGTH_S - 90) / 240
        alone = 2200 < at_s < 2262
        points.append({
            "wall_s": NOON_S + at_s, "step": int(8 * (at_s - 60)), "world_size": 2 if alone else 4,
            "steps_per_s": 4.1 if alone else 8.0 + 0.15 * math.sin(i / 3),
            "loss": 0.3 + 2.2 * math.exp(-i / 55) + 0.03 * math.sin(i * 1.7),
        })  # fmt: skip
    return msgspec.convert({"job": "train", "node": "a", "every_s": 15.0, "points": points}, History)


def make(folder: pathlib.Path = HERE) -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    known = training()
    seen = snapshot(known)
    detail, found = views.job_detail(seen, known, NOW), views.incidents(seen, "train", NOW)
    shown = Top(cluster="main", wall_s=NOW.wall_s, etcd=EtcdContact(connected=True), jobs=[detail])
    screen = top.screen(shown, WIDTH, live=False)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in screen:
        console.print(Text.from_ansi(line.styled(True)), no_wrap=True)
    drawn = console.export_svg(title="elasticctl top", unique_id="top")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # nothing is loaded from elsewhere
    (folder / "top.svg").write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n")
    fragment = live.job(detail, found, history(), [], NOW.wall_s)
    (folder / "page.html").write_text(re.sub(r"<script>.*?</script>\n?", "", live.document("main", "train", fragment),
                                           flags=re.DOTALL))  # fmt: skip
    (folder / "report.html").write_text(report.page(detail, found, history(), NOW.wall_s))


if __name__ == "__main__":
    make(*map(pathlib.Path, sys.argv[1:]))
