"""The thread that waits for the driver's events: it releases the driver and survives errors."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from gpuledger.keys import NodeId
from gpuledger.runtime import Backoff
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.event_thread import EventThread
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import GpuIdentity
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import SimulatedNode
from tests.fakes.nvml import Altered
from tests.hanging import HANG_SECONDS
from tests.unit.agent.core.incidents.builders import EPOCH_NS, failing_node, gpus_of


class Driver(Altered):
    """A played driver whose waits can be made to fail, or to hang."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__(node.nvml)
        self.node = node
        self.errors: SimpleQueue[Exception] = SimpleQueue()
        self.hangs = threading.Event()
        self.hangs.set()
        self.waiting = threading.Event()
        self.sets = 0
        self.created: SimpleQueue[int] = SimpleQueue()
        self.freed = 0
        self.waits_ms: set[int] = set()

    def nvmlEventSetCreate(self) -> Any:  # noqa: ANN401, N802  # NVML's own
        self.sets += 1
        self.created.put(self.sets)
        return self.node.nvml.nvmlEventSetCreate()

    def nvmlEventSetFree(self, events: Any) -> None:  # noqa: ANN401, N802  # NVML's own
        self.freed += 1
        self.node.nvml.nvmlEventSetFree(events)

    def nvmlEventSetWait_v3(self, events: Any, params: Any) -> None:  # noqa: ANN401, N802  # NVML's own
        self.waits_ms.add(params.timeoutMs)
        self.waiting.set()
        self.hangs.wait()
        try:
            error = self.errors.get_nowait()
        except Empty:
            self.node.nvml.nvmlEventSetWait_v3(events, params)
        else:
            raise error


@contextmanager
def watching(
    driver: Driver, gpus: Sequence[GpuIdentity], clock: ManualClock
) -> Iterator[tuple[EventThread, SimpleQueue[Detection]]]:
    seen: SimpleQueue[Detection] = SimpleQueue()
    thread = EventThread(
        NvmlSession(driver),
        gpus,
        clock=clock,
        on_detection=seen.put,
        backoff=Backoff(first_seconds=0.001, max_seconds=0.002),
    )
    try:
        yield thread, seen
    finally:
        driver.hangs.set()
        assert thread.end(HANG_SECONDS)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


def bursting(clock: ManualClock, times: int = 1) -> Driver:
    return Driver(failing_node({"at_seconds": 1, "xid": 31, "times": times}, clock=clock))


def test_an_event_is_detected_while_the_library_is_open(clock: ManualClock) -> None:
    driver = bursting(clock)
    with watching(driver, gpus_of(driver.node), clock) as (_, seen):
        assert driver.waiting.wait(HANG_SECONDS)
        clock.advance(2)
        assert seen.get(timeout=HANG_SECONDS).xid == 31


def test_a_burst_is_drained_at_full_speed(clock: ManualClock) -> None:
    driver = bursting(clock, times=2000)
    with watching(driver, gpus_of(driver.node), clock) as (_, seen):
        assert driver.waiting.wait(HANG_SECONDS)
        clock.advance(5)
        times = [seen.get(timeout=HANG_SECONDS).time_ns for _ in range(2000)]
    assert times == sorted(set(times))


def test_ending_the_thread_frees_the_set_after_one_more_wait_of_half_a_second(
    clock: ManualClock,
) -> None:
    driver = bursting(clock)
    with watching(driver, gpus_of(driver.node), clock) as (thread, _):
        assert driver.waiting.wait(HANG_SECONDS)
        assert thread.end(HANG_SECONDS)
        assert (driver.sets, driver.freed, driver.waits_ms) == (1, 1, {500})


def test_a_thread_that_hangs_is_abandoned_and_frees_nothing_of_a_closed_library(
    clock: ManualClock,
) -> None:
    driver = bursting(clock)
    driver.hangs.clear()
    with watching(driver, gpus_of(driver.node), clock) as (thread, _):
        assert driver.waiting.wait(HANG_SECONDS)
        assert not thread.end(0.01)
        driver.hangs.set()
        assert thread.join(HANG_SECONDS)
        assert driver.freed == 0


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
        pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),
        TypeError("an error that no binding should raise"),
    ],
)
def test_after_an_error_a_new_set_has_the_remaining_events(
    clock: ManualClock, error: Exception
) -> None:
    driver = bursting(clock)
    driver.errors.put(pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT))
    driver.errors.put(error)
    with watching(driver, gpus_of(driver.node), clock) as (_, seen):
        assert [driver.created.get(timeout=HANG_SECONDS) for _ in range(2)] == [1, 2]
        driver.waiting.clear()
        assert driver.waiting.wait(HANG_SECONDS)
        clock.advance(2)
        assert seen.get(timeout=HANG_SECONDS).xid == 31
        assert driver.freed == 1


def test_waits_that_end_early_are_not_repeated_at_once(clock: ManualClock) -> None:
    driver = bursting(clock)
    for _ in range(50):
        driver.errors.put(pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT))
    with watching(driver, gpus_of(driver.node), clock) as (thread, _):
        assert driver.waiting.wait(HANG_SECONDS)
        assert thread.end(HANG_SECONDS)
        assert driver.errors.qsize() > 40


def test_a_driver_without_events_is_tried_once(clock: ManualClock) -> None:
    driver = Driver(failing_node(clock=clock, events={"version": "none"}))
    with watching(driver, gpus_of(driver.node), clock) as (thread, _):
        assert thread.join(HANG_SECONDS)
        assert driver.sets == 1


def test_a_closed_library_does_not_end_the_thread_early(clock: ManualClock) -> None:
    driver = bursting(clock)
    gpus = gpus_of(driver.node)
    driver.node.nvml.nvmlShutdown()
    with watching(driver, gpus, clock) as (thread, _):
        assert not thread.join(0.01)


def test_the_number_of_hanging_threads_is_bounded(clock: ManualClock) -> None:
    before, driver = event_threads(), bursting(clock)
    driver.hangs.clear()
    gpus = gpus_of(driver.node)
    watch = IncidentMonitor(
        node=NodeId("default", "node-a"),
        boot_id="boot-1",
        source=NvmlSession(driver),
        clock=clock,
        publish=lambda _one: None,
    )
    watch.closing_seconds = 0.001
    for _ in range(6):
        watch.opened(gpus)
    watch.closing()
    hanging = event_threads() - before
    driver.hangs.set()
    for thread in hanging:
        thread.join(HANG_SECONDS)

    assert len(hanging) == 4
    watch.opened(gpus)
    assert len(event_threads() - before) == 1, "there is room for another one"
    watch.closing()


def event_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gpu-events"}


def test_if_no_gpu_answers_no_event_is_waited_for_and_no_failure_is_reported(
    clock: ManualClock,
) -> None:
    driver = bursting(clock)
    watch = IncidentMonitor(
        node=NodeId("default", "node-a"),
        boot_id="boot-1",
        source=NvmlSession(driver),
        clock=clock,
        publish=lambda _one: None,
    )
    with capture_logs() as logs:
        watch.opened([])
        # Closing joins the thread, so whatever it would have done is done.
        watch.closing()
    assert (driver.sets, logs) == (0, [])
    watch.opened(gpus_of(driver.node))
    assert driver.created.get(timeout=HANG_SECONDS) == 1
    watch.closing()
