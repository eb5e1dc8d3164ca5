"""The screens of elasticctl from the JSON that it gets."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd.api.views import columns
from elasticd.base.answers import Incident, Job, JobDetail, Json, Node, Status, WorkerError, read
from elasticd.base.command_answers import Config
from elasticd.ctl.show import render
from elasticd.ctl.show.screen import Console


def status(data: Json) -> None:
    render.status(read(data, Status))


def job(data: Json) -> None:
    render.job(read(data, JobDetail))


def jobs(rows: Sequence[Json]) -> None:
    render.table(columns.JOBS, [read(row, Job) for row in rows], "no jobs")


def nodes(rows: Sequence[Json]) -> None:
    render.table(columns.NODES, [read(row, Node) for row in rows], "no nodes")


def incidents(rows: Sequence[Json]) -> None:
    render.table(columns.INCIDENTS, [read(row, Incident) for row in rows], "no incidents")


def checkpoints(rows: Sequence[Json]) -> None:
    render.checkpoints(rows)


def config(data: Json) -> None:
    render.config(read(data, Config), explain=True)


def incident(row: Json) -> None:
    render.incident(read(row, Incident))


def print_error(out: Console, error: Json) -> None:
    render.print_error(out, read(error, WorkerError))
