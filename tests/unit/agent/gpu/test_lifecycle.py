"""Whatever the library does at a start is a start that failed, and nothing worse."""
# ruff: noqa: N802  # NVML's own names

import threading

import pytest

from gpuledger_agent.gpu.lifecycle import SourceLifecycle
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import DriverEvent, LibraryLostError
from tests.errors import has_words
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.hanging import HANG_SECONDS


class StrangeNvml(FakeNvml):
    """Gives what the binding says that it never does."""

    def __init__(self, **answers: object) -> None:
        super().__init__(FakeGpu("GPU-0"))
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)


def test_an_answer_that_no_binding_should_give_is_a_start_that_failed() -> None:
    lifecycle = SourceLifecycle(NvmlSession(StrangeNvml(nvmlDeviceGetCount="one")), listeners=())
    with pytest.raises(LibraryLostError, check=has_words("TypeError")):
        lifecycle.open().result(HANG_SECONDS)
    lifecycle.end()


def test_events_that_nobody_can_read_are_listened_to_no_more() -> None:
    library = StrangeNvml(
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


class WaitingNvml(StrangeNvml):
    """Its look for system events lasts until the test lets it return."""

    def __init__(self) -> None:
        super().__init__(
            nvmlSystemEventSetCreate=object(),
            nvmlSystemRegisterEvents=None,
            nvmlSystemEventSetFree=None,
        )
        self.returns = threading.Event()

    def nvmlSystemEventSetWait(self, *_: object) -> list[object]:
        self.returns.wait()
        return []


def test_only_a_look_that_outlasts_the_tick_in_which_it_began_is_stuck() -> None:
    library = WaitingNvml()
    lifecycle = SourceLifecycle(NvmlSession(library), listeners=())
    lifecycle.open().result(HANG_SECONDS)
    stuck = []
    for _ in range(2):
        lifecycle.poll_driver_events()
        stuck.append(lifecycle.is_stuck)
    library.returns.set()
    lifecycle.close().result(HANG_SECONDS)
    assert [*stuck, lifecycle.is_stuck] == [False, True, False]
    lifecycle.end()
