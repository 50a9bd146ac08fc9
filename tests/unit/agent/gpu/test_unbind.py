"""If its driver will be unbound the agent releases it, and retries until it is back."""
# ruff: noqa: ANN401, N802  # NVML's own names, and its structs have no types

from typing import Any

import pynvml
import pytest

from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.nvidia.events import NvmlDriverEvents
from gpuledger_agent.gpu.protocol import DriverEvent, DriverNotLoadedError, LibraryLostError
from gpuledger_simulator.clock import ManualClock
from tests.fakes.gpus import PlayedGpu, PlayedSource, await_driver_thread
from tests.fakes.nvml_pointers import referent_of

UNBIND = pynvml.nvmlSystemEventTypeGpuDriverUnbind
BIND = pynvml.nvmlSystemEventTypeGpuDriverBind
CALLS = {
    "create": "nvmlSystemEventSetCreate",
    "register": "nvmlSystemRegisterEvents",
    "wait": "nvmlSystemEventSetWait",
    "free": "nvmlSystemEventSetFree",
}


class PlayedEvents:
    """The system events of a driver; its functions check their arguments."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.sets = 0
        self.error: int | None = None

    def nvmlSystemEventSetCreate(self, version: int) -> str:
        assert version == pynvml.nvmlSystemEventSetCreateRequest_v1
        self._fail()
        self.sets += 1
        return "set"

    def nvmlSystemEventSetFree(self, version: int, held: str) -> None:
        assert (version, held) == (pynvml.nvmlSystemEventSetFreeRequest_v1, "set")
        self.sets -= 1

    def nvmlSystemRegisterEvents(self, version: int, events: int, held: str) -> None:
        assert (version, held) == (pynvml.nvmlSystemRegisterEventRequest_v1, "set")
        assert events == UNBIND | BIND

    def nvmlSystemEventSetWait(
        self, version: int, held: str, milliseconds: int, data: Any, size: int
    ) -> list[dict[str, int]]:
        assert version == pynvml.nvmlSystemEventSetWaitRequest_v1
        assert size == len(data)
        self._fail()
        happened, self.waiting = self.waiting, []
        return [{"eventType": kind, "gpuId": 0} for kind in happened]

    def _fail(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)


@pytest.mark.parametrize(
    ("happened", "event"),
    [
        ([], DriverEvent.NOTHING),
        ([UNBIND], DriverEvent.UNBIND),
        ([BIND], DriverEvent.BIND),
        ([BIND, UNBIND], DriverEvent.UNBIND),
    ],
)
def test_an_event_of_the_driver_is_returned_once(happened: list[int], event: DriverEvent) -> None:
    library = PlayedEvents()
    events = NvmlDriverEvents(library)
    events.open()
    library.waiting = happened
    assert [events.poll(), events.poll()] == [event, DriverEvent.NOTHING]
    events.close()
    assert library.sets == 0


def test_a_library_without_these_events_is_reported_and_polls_return_nothing() -> None:
    events = NvmlDriverEvents(object())
    events.open()
    assert not events.is_open
    assert (
        events.capability.reason
        == "nvmlSystemEventSetCreate: not available in this version of nvidia-ml-py"
    )
    assert events.poll() is DriverEvent.NOTHING
    events.close()


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT]
)
def test_an_error_ends_the_listening_and_frees_the_set(code: int) -> None:
    library = PlayedEvents()
    events = NvmlDriverEvents(library)
    events.open()
    library.error = code
    assert events.poll() is DriverEvent.NOTHING
    assert not events.is_open
    assert library.sets == 0
    assert events.capability.reason


def test_the_real_wrappers_are_called_with_valid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def pointer(name: str) -> Any:
        def function(request: Any) -> int:
            called.append(name)
            if name == CALLS["create"]:
                referent_of(request).set = pynvml.c_nvmlSystemEventSet_t(
                    pynvml.struct_c_nvmlSystemEventSet_t()
                )
            if name == CALLS["wait"]:
                assert (referent_of(request).timeoutms, referent_of(request).dataSize) == (1, 16)
                referent_of(request).data[0].eventType = UNBIND
                referent_of(request).numEvent = 1
            return 0

        return function

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", pointer)
    events = NvmlDriverEvents(pynvml)
    events.open()
    assert events.capability.supported
    assert events.poll() is DriverEvent.UNBIND
    events.close()
    assert called == list(CALLS.values())


async def test_the_library_is_closed_on_unbinding_and_reopened_when_the_driver_is_back() -> None:
    clock, check, library = ManualClock(start_ns=0), Check(), PlayedEvents()
    nvml = PlayedSource(PlayedGpu("GPU-0", 0))
    nvml.driver_events = NvmlDriverEvents(library)
    reported = []
    driver = Driver(
        nvml,
        clock=clock,
        check=check,
        deadline_seconds=30,
        backoff=Backoff(first_seconds=1, max_seconds=8, jitter=lambda: 1.0),
        report=lambda kind, uuid, _: reported.append((kind, uuid)),
    )

    async def query() -> bool:
        poll = await driver.poll({})
        # Polls for events run in the library's thread, between two ticks.
        await_driver_thread(driver)
        clock.advance(1)
        return bool(poll and poll.samples)

    assert await query()
    library.waiting = [UNBIND]
    assert [await query() for _ in range(3)] == [True, False, False]
    assert not nvml.is_open
    assert library.sets == 0
    nvml.error = DriverNotLoadedError("nvmlInit: Driver Not Loaded")
    for _ in range(30):
        assert not await query()
    assert driver.idle_seconds < 30
    assert check.detail == "the driver was unbound: nvmlInit: Driver Not Loaded"
    nvml.error = None
    while not await query():
        pass
    assert reported == [("driver_unbound", "GPU-0"), ("driver_reloaded", "GPU-0")]
    assert library.sets == 1
    driver.close()


async def test_an_unbind_event_during_a_restart_of_the_library_is_handled_after_it() -> None:
    library, clock = PlayedEvents(), ManualClock(start_ns=0)
    gpus = [PlayedGpu("GPU-0", 0), PlayedGpu("GPU-1", 1)]
    nvml = PlayedSource(*gpus)
    nvml.driver_events = NvmlDriverEvents(library)
    driver = Driver(nvml, clock=clock, check=Check(), deadline_seconds=30, backoff=Backoff())
    await driver.poll({})
    clock.advance(60)
    library.waiting = [UNBIND]
    for gpu in gpus:
        gpu.errors = dict.fromkeys(CallGroup, LibraryLostError("lost"))
    poll = await driver.poll({})
    assert poll is not None
    assert poll.samples == [], "the library restarts, and has received the event"
    for gpu in gpus:
        gpu.errors.clear()
    await_driver_thread(driver)
    poll = await driver.poll({})
    assert poll is not None
    assert poll.samples
    assert await driver.poll({}) is None
    await_driver_thread(driver)
    assert not nvml.is_open
    driver.close()
