"""GPUs whose query groups return answers, fail or hang as a test decides, and their library."""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpuledger.clock import Clock
from gpuledger.records import Capability, GpuFacts
from gpuledger_agent.core.raw import (
    CallGroup,
    ClockReading,
    FastPoll,
    SampleCursor,
)
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.protocol import (
    DriverEvent,
    DriverEvents,
    Gpu,
    GpuEventSet,
    GpuIdentity,
    SourceLostError,
    UnsupportedError,
)
from tests.hanging import HANG_SECONDS

ANSWERS: dict[CallGroup, dict[str, Any]] = {
    CallGroup.USAGE: {"energy_millijoules": 1},
    CallGroup.SENSORS: {"sensors": {"clock": 1}},
    CallGroup.READINGS: {"readings": {"throttled": 2}},
    CallGroup.PROFILING: {"profiling": {"active": 3}},
    CallGroup.HEALTH: {"health": {"errors": 4}},
}


class PlayedGpu:
    """A GPU from a source without a vendor."""

    handle = None
    has_process_accounting = False

    def __init__(self, uuid: str, index: int) -> None:
        self.uuid, self.index = uuid, index
        self.errors: dict[CallGroup, Exception] = {}
        self.hangs: dict[CallGroup, threading.Event] = {}
        """Groups that block until the event is set."""
        self.model: str | None = None
        """The model in the answers of USAGE."""
        self.facts: GpuFacts | None = None
        self.requests: Counter[CallGroup] = Counter()
        self.threads: set[int] = set()
        """The threads that queried this GPU."""

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        self.requests[group] += 1
        self.threads.add(threading.get_ident())
        if group in self.hangs:
            self.hangs[group].wait()
        if group in self.errors:
            raise self.errors[group]
        if group is CallGroup.USAGE and self.model:
            return {**ANSWERS[group], "model": self.model}
        if group is CallGroup.HEALTH and self.facts:
            return {**ANSWERS[group], "facts": self.facts}
        return ANSWERS[group]

    def hang(self, *groups: CallGroup) -> threading.Event:
        released = threading.Event()
        self.hangs = dict.fromkeys(groups, released)
        return released

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        return FastPoll(uuid=self.uuid, at=at)


class SilentDriver:
    """A driver that reports nothing about itself."""

    is_open = False

    def __init__(self) -> None:
        self.capability = Capability(call="events", supported=False, reason="not open yet")

    def open(self) -> None:
        pass

    def poll(self) -> DriverEvent:
        return DriverEvent.NOTHING

    def close(self) -> None:
        pass


def await_driver_thread(driver: Driver) -> None:
    """Wait until the thread that opens, closes and watches the driver has finished its work."""
    driver.lifecycle.worker.start(lambda: None).result(HANG_SECONDS)


def await_probe(driver: Driver) -> None:
    """Wait until the thread that probes lost GPUs has finished its work."""
    if driver.probe.thread:
        driver.probe.thread.start(lambda: None).result(HANG_SECONDS)


class PlayedSource:
    """Opens the existing GPUs, or raises the error that the test sets."""

    def __init__(self, *gpus: PlayedGpu) -> None:
        self.driver_events: DriverEvents = SilentDriver()
        self.unfound: Mapping[int, str] = {}
        self.origin = ""
        self.is_open = False
        self.is_stuck = False
        self.gpus = list(gpus)
        self.gone: set[str] = set()
        self.names: dict[str, str] = {}
        """Names of GPUs in `unfound`, if they are not placeholders."""
        self.error: SourceLostError | None = None
        self.opens: threading.Event | None = None
        """Opening blocks until this event is set."""
        self.tried = 0
        self.probed = 0
        self.answers_probes: bool | None = None
        """Whether lost GPUs answer probes; by default only if they would be found."""

    def open(self) -> Sequence[Gpu]:
        self.tried += 1
        if self.opens:
            self.opens.wait()
        if self.error:
            raise self.error
        self.is_open = True
        gone = [gpu for gpu in self.gpus if gpu.uuid in self.gone]
        self.unfound = {gpu.index: self._name(gpu) for gpu in gone}
        return [gpu for gpu in self.gpus if gpu.uuid not in self.gone]

    def close(self) -> None:
        self.is_open = False

    def is_answering(self, name: str) -> bool:
        self.probed += 1
        if self.answers_probes is not None:
            return self.answers_probes
        gone = [gpu for gpu in self.gpus if gpu.uuid in self.gone]
        return all(name not in (gpu.uuid, self._name(gpu)) for gpu in gone)

    def _name(self, gpu: PlayedGpu) -> str:
        return self.names.get(gpu.uuid, f"INDEX:{gpu.index}")

    def pci_buses(self, gpus: Sequence[GpuIdentity]) -> Mapping[str, str]:
        return {}

    def versions(self) -> Mapping[str, str | None]:
        return {"driver_version": "1.0"}

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> GpuEventSet:
        raise UnsupportedError("no test waits for these")
