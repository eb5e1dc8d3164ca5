"""The answers that `views` makes, as JSON: what a script reads."""

from __future__ import annotations

from typing import Any

import msgspec

from elasticd.api.views import views
from elasticd.base.answers import Json


def status(*given: Any, **more: Any) -> Json:
    data: Json = msgspec.to_builtins(views.status(*given, **more))
    return data


def nodes(*given: Any) -> list[Json]:
    rows: list[Json] = msgspec.to_builtins(views.nodes(*given))
    return rows


def job_row(*given: Any) -> Json:
    data: Json = msgspec.to_builtins(views.job_row(*given))
    return data


def job_detail(*given: Any, **more: Any) -> Json:
    data: Json = msgspec.to_builtins(views.job_detail(*given, **more))
    return data


def incident(*given: Any) -> Json:
    data: Json = msgspec.to_builtins(views.incident(*given))
    return data


def incidents(*given: Any) -> list[Json]:
    rows: list[Json] = msgspec.to_builtins(views.incidents(*given))
    return rows
