"""The live page in a browser: it shows a recovery as it happens, and its policy lets its own script run."""

from __future__ import annotations

import pathlib
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support import chromium
from support.pages import EVIL
from support.snapshots import job, progress, snapshot
from support.wait import eventually

from elastic.contract.records.job_records import IncidentRecord, JobState, Phase, encode
from elastic.contract.records.node_records import EventRecord
from elasticd.api.page import server
from elasticd.api.views import views
from elasticd.base.folders import Folder
from elasticd.base.settings import PageSettings
from elasticd.cluster.published_state import PublishedState

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium on this machine"),
]
IDENTITY = views.Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_an_open_page_shows_a_recovery_as_it_happens(tmp_path: pathlib.Path) -> None:
    published, log = PublishedState(), Quiet()
    source = server.PageSource(published, IDENTITY, lambda name: Folder(tmp_path, (name, "logs")))

    def publish(step: int, *incidents: IncidentRecord, reason: str = "") -> None:
        now_s = time.time()
        state = JobState(phase=Phase.RUNNING, reason=reason)
        known = job(progress=progress(step, wall_s=now_s), incidents=incidents, state=state)
        published.publish(replace(snapshot(known), turned_s=time.monotonic()))

    publish(41)
    served = server.page_server(PageSettings(listen="127.0.0.1:0"), lambda: "", source, log)
    threading.Thread(target=served.serve, daemon=True).start()
    try:
        with chromium.Chromium(tmp_path / "profile") as browser:
            browser.show(390, 844)
            browser.open(f"{served.url}/job/train")
            shown = "document.querySelector('main').innerText"
            assert "41" in browser.value(shown)
            is_open = "[...document.querySelectorAll('td')].some(cell => cell.innerText === 'so far')"
            assert not browser.value(is_open)
            assert browser.value("document.documentElement.scrollWidth") <= 390, "no sideways scrolling on a phone"
            broken = IncidentRecord(
                generation=3, kind="exit", node="b", ranks=(2,), detail="killed", wall_s=time.time(),
                open=True,
            )  # fmt: skip
            publish(42, broken, reason=EVIL)
            eventually(lambda: browser.value(is_open) and "alert(" in browser.value(shown), 10)
            publish(43, closed(broken))
            eventually(lambda: "231 ms" in browser.value(shown), 10)
            assert browser.value("document.querySelectorAll('script, img').length") == 1, "the page's own script"
            assert browser.value("document.getElementById('live').textContent") == "live"
            assert not [said for said in browser.errors if "favicon" not in said]
    finally:
        served.listener.shutdown(socket.SHUT_RDWR)
        served.listener.close()


def closed(record: IncidentRecord) -> IncidentRecord:
    return msgspec.structs.replace(
        record, open=False, timeline_s={"aborted": 0.01, "stepping": 0.231}, steps_lost=0, steps_lost_at_most=0
    )


def test_texts_of_events_have_the_width_of_a_phone(tmp_path: pathlib.Path) -> None:
    """They stood in the last of four columns, ten characters wide."""
    event = EventRecord(
        when_wall_s=990.0, kind="incident.opened", job="train", node="b", text="out of memory: killed " * 5
    )
    published, base = PublishedState(), snapshot(job())
    cluster = replace(base.cluster, events={"/elastic/main/events/1.a.x": encode(event)})
    published.publish(replace(base, cluster=cluster, turned_s=time.monotonic()))
    source = server.PageSource(published, IDENTITY, lambda name: Folder(tmp_path, (name, "logs")))
    served = server.page_server(PageSettings(listen="127.0.0.1:0"), lambda: "", source, Quiet())
    threading.Thread(target=served.serve, daemon=True).start()
    try:
        with chromium.Chromium(tmp_path / "profile") as browser:
            browser.show(390, 844)
            browser.open(f"{served.url}/")
            assert browser.value("document.querySelector('.long td.what').clientWidth") > 300
            assert browser.value("document.documentElement.scrollWidth") <= 390
    finally:
        served.listener.shutdown(socket.SHUT_RDWR)
        served.listener.close()
