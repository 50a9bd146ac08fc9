"""GPUs whose groups of questions a test answers, fails or lets hang, and a library of them."""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from agent.core.raw import CallGroup, SampleCursor
from agent.gpu.nvidia.client import NvmlLostError
from agent.gpu.nvidia.session import Gpu, NvmlSession
from gpuledger.records import GpuFacts

ANSWERS: dict[CallGroup, dict[str, Any]] = {
    CallGroup.BOOKS: {"energy_millijoules": 1},
    CallGroup.READINGS: {"readings": {"clock": 2}},
    CallGroup.PROFILING: {"profiling": {"active": 3}},
    CallGroup.HEALTH: {"health": {"errors": 4}},
}


class PlayedGpu(Gpu):
    def __init__(self, uuid: str, index: int) -> None:
        super().__init__(library=None, handle=None, uuid=uuid, index=index)
        self.errors: dict[CallGroup, Exception] = {}
        self.hangs: dict[CallGroup, threading.Event] = {}
        """Groups that block until the event is set."""
        self.facts: GpuFacts | None = None
        self.asked: Counter[CallGroup] = Counter()
        self.threads: set[int] = set()
        """The threads that asked."""

    @override
    def answers_of(self, group: CallGroup, last_seen: SampleCursor) -> dict[str, Any]:
        self.asked[group] += 1
        self.threads.add(threading.get_ident())
        if group in self.hangs:
            self.hangs[group].wait()
        if group in self.errors:
            raise self.errors[group]
        if group is CallGroup.HEALTH and self.facts:
            return {**ANSWERS[group], "facts": self.facts}
        return ANSWERS[group]

    def hang(self, *groups: CallGroup) -> threading.Event:
        released = threading.Event()
        self.hangs = dict.fromkeys(groups, released)
        return released

    @override
    def close(self) -> None:
        pass


class PlayedNvml(NvmlSession):
    """Opens the GPUs that are there, unless the test gives it an error."""

    def __init__(self, *gpus: PlayedGpu) -> None:
        super().__init__(None)
        self.gpus = list(gpus)
        self.gone: set[str] = set()
        self.error: NvmlLostError | None = None
        self.opens: threading.Event | None = None
        """An opening blocks until it is set."""
        self.tried = 0
        self.is_open = False

    @override
    def open(self) -> list[Gpu]:
        self.tried += 1
        if self.opens:
            self.opens.wait()
        if self.error:
            raise self.error
        self.is_open = True
        gone = [gpu for gpu in self.gpus if gpu.uuid in self.gone]
        self.unfound = {gpu.index: f"INDEX:{gpu.index}" for gpu in gone}
        return [gpu for gpu in self.gpus if gpu.uuid not in self.gone]

    @override
    def close(self) -> None:
        self.is_open = False

    @override
    def versions(self) -> Mapping[str, str | None]:
        return {"driver_version": "1.0"}
