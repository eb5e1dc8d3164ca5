"""`GET /v1/doctor`: the checks of this node, of etcd, and of all other nodes, compared. See docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .job_routes import asking

if TYPE_CHECKING:
    from elasticd.api.request import Request


def get_doctor(h: Request, query: Mapping[str, str]) -> None:
    h.send_json(200, h.service.doctor.whole(h.service.published.now, asking(h)))


def get_doctor_local(h: Request, query: Mapping[str, str]) -> None:
    h.send_json(200, h.service.doctor.answer(query.get("connect", ""), h.service.published.now))
