"""Any error of the library at a start is a failed start, and nothing worse."""

import threading

import pytest

from gpuledger_agent.gpu.lifecycle import SourceLifecycle
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import DriverEvent, LibraryLostError
from gpuledger_simulator.clock import ManualClock
from tests.errors import has_words
from tests.fakes.nvml import Altered, play_node
from tests.hanging import HANG_SECONDS


def strange(**answers: object) -> Altered:
    """Return a library with results that the binding should never return."""
    library = Altered(play_node(ManualClock(start_ns=0)).nvml)
    for name, answer in answers.items():
        library.answer(name, answer)
    return library


def test_an_impossible_result_is_a_failed_start() -> None:
    lifecycle = SourceLifecycle(NvmlSession(strange(nvmlDeviceGetCount="one")), listeners=())
    with pytest.raises(LibraryLostError, check=has_words("TypeError")):
        lifecycle.open().result(HANG_SECONDS)
    lifecycle.end()


def test_unreadable_driver_events_are_no_longer_polled() -> None:
    library = strange(
        nvmlSystemEventSetCreate=object(),
        nvmlSystemRegisterEvents=None,
        nvmlSystemEventSetWait=[object()],
        nvmlSystemEventSetFree=None,
    )
    lifecycle = SourceLifecycle(NvmlSession(library), listeners=())
    lifecycle.open().result(HANG_SECONDS)
    assert lifecycle.unbind_capability.supported
    assert lifecycle.poll_driver_events() is DriverEvent.NOTHING
    lifecycle.open().result(HANG_SECONDS)
    assert lifecycle.poll_driver_events() is DriverEvent.NOTHING
    lifecycle.close().result(HANG_SECONDS)
    lifecycle.end()


def test_only_a_poll_for_driver_events_that_outlasts_its_tick_is_stuck() -> None:
    library = strange(
        nvmlSystemEventSetCreate=object(),
        nvmlSystemRegisterEvents=None,
        nvmlSystemEventSetFree=None,
    )
    returns = threading.Event()

    def wait(*_: object) -> list[object]:
        returns.wait()
        return []

    library.functions["nvmlSystemEventSetWait"] = wait
    lifecycle = SourceLifecycle(NvmlSession(library), listeners=())
    lifecycle.open().result(HANG_SECONDS)
    stuck = []
    for _ in range(2):
        lifecycle.poll_driver_events()
        stuck.append(lifecycle.is_stuck)
    returns.set()
    lifecycle.close().result(HANG_SECONDS)
    assert [*stuck, lifecycle.is_stuck] == [False, True, False]
    lifecycle.end()
