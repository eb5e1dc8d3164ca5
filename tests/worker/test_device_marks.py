"""Parts of a step on a GPU, by events that are polled: the device's own times, whenever the host looks."""

from __future__ import annotations

import pytest

from elastic.agent.reports.step_times import own_s, parts
from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing
from elastic.worker.torch_internals.device_marks import MOST_MARKS, MOST_STEPS, DeviceMarks


class Device:
    """A stream: what is queued takes time on it, which passes when the test says so. Asking for an event's time before
    it has passed, or waiting for it, is an error as in CUDA."""

    def __init__(self) -> None:
        self.queued_ms = self.passed_ms = 0.0
        self.made = 0
        self.capturing = False

    def work(self, ms: float) -> None:
        self.queued_ms += ms

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def catch_up(self) -> None:
        self.passed_ms = self.queued_ms


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at_ms = device, -1.0

    def record(self) -> None:
        assert not self._device.capturing, "a part of the graph: CUDA raises where it is queried"
        self.at_ms = self._device.queued_ms

    def query(self) -> bool:
        return self.at_ms <= self._device.passed_ms

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "not ready: CUDA raises here"
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("nothing may wait for the device")


class Loop:
    """A training loop's marks, with so many ms on the device for each part."""

    def __init__(self) -> None:
        self.device = Device()
        self.page = BeatPage(memoryview(bytearray(PAGE_BYTES)))
        self.page.clear(0.0)
        self.page.place(1, 0)
        self.marks = DeviceMarks(self.page.on_device, self.device.event, lambda: self.device.capturing)
        self.marks.enter()
        self.step_number = 0

    def step(self, compute: float = 50, exchange: float = 20, optimizer: float = 10) -> None:
        self.device.work(compute)
        self.marks.mark(Doing.EXCHANGING)
        self.device.work(exchange)
        self.marks.mark(Doing.COMPUTING)
        self.marks.mark(Doing.APPLYING)
        self.device.work(optimizer)
        self.step_number += 1
        self.page.committed(self.step_number, 0.1, None, 0.0)
        self.marks.committed()


def test_parts_of_a_step_are_the_devices_own_times_and_the_host_never_waits() -> None:
    loop = Loop()
    loop.step()
    before = loop.page.read()
    assert before.device_steps == 0, "the device has not begun"
    loop.device.catch_up()
    for _ in range(4):
        loop.step()
        loop.device.catch_up()
    loop.step()
    after = loop.page.read()
    assert after.device_steps == 5
    found = parts(before, after, 0.4, gpu=True)
    assert found is not None
    assert (found.compute_s, found.collectives_s, found.optimizer_s) == (0.05, 0.02, 0.01)
    assert own_s(found) == pytest.approx(0.06)


def test_until_a_step_has_passed_on_the_device_its_parts_are_not_known() -> None:
    loop = Loop()
    loop.step()
    before = loop.page.read()
    loop.step()
    found = parts(before, loop.page.read(), 0.1, gpu=True)
    assert found is not None
    assert (found.compute_s, found.collectives_s, own_s(found)) == (None, None, None)


def test_of_a_host_that_runs_far_ahead_the_oldest_steps_are_dropped_and_events_are_reused() -> None:
    loop = Loop()
    for _ in range(3 * MOST_STEPS):
        loop.step()
    assert loop.page.read().device_steps == 0
    loop.device.catch_up()
    loop.step()
    assert loop.page.read().device_steps == MOST_STEPS - 1, "all but the one that was just queued"
    made = loop.device.made
    for _ in range(MOST_STEPS):
        loop.device.catch_up()
        loop.step()
    assert loop.device.made <= made + 2


def test_a_new_generation_measures_no_step_of_the_one_before() -> None:
    loop = Loop()
    loop.step()
    loop.device.work(500)
    loop.marks.enter()
    loop.step()
    loop.device.catch_up()
    loop.step()
    shown = loop.page.read()
    assert shown.device_steps == 1
    assert shown.device_s[Doing.COMPUTING] == pytest.approx(0.05)


def test_a_step_in_which_a_graph_is_captured_or_with_too_many_marks_is_not_measured() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step()
        loop.device.catch_up()
    assert loop.marks._free, "events that were used before"
    loop.device.capturing = True
    loop.step()
    loop.device.capturing = False
    measured = loop.page.read().device_steps
    loop.marks.enter()
    for number in range(MOST_MARKS + 5):
        loop.marks.mark(Doing.EXCHANGING if number % 2 else Doing.APPLYING)
    loop.step()
    loop.device.catch_up()
    loop.step()
    loop.device.catch_up()
    loop.step()
    assert loop.page.read().device_steps == measured + 1, "the last but one"
