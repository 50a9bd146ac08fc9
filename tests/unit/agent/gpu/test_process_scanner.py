"""Looks between ticks: who is new on the GPUs, and a call that hangs costs no tick."""

import threading
from collections.abc import Collection

from typing_extensions import override

from agent.gpu.pool import ProcessScanner
from agent.gpu.protocol import FailedError
from tests.fakes.gpus import PlayedGpu
from tests.hanging import HANG_SECONDS


class BusyGpu(PlayedGpu):
    """A GPU whose lists a test fills."""

    def __init__(self, uuid: str, pids: Collection[int] = ()) -> None:
        super().__init__(uuid, 0)
        self.pids = set(pids)
        self.fails = False
        self.released = threading.Event()
        self.released.set()

    @override
    def running_pids(self) -> frozenset[int] | None:
        self.released.wait(HANG_SECONDS)
        if self.fails:
            raise FailedError("no")
        return frozenset(self.pids)


async def test_only_who_is_new_since_the_last_look_is_given() -> None:
    one, other = BusyGpu("GPU-0", [1, 2]), BusyGpu("GPU-1", [5])
    scanner = ProcessScanner()
    assert set(await scanner.scan([one, other])) == set()
    one.pids.add(3)
    other.pids.add(6)
    assert set(await scanner.scan([one, other])) == {3, 6}
    assert set(await scanner.scan([one, other])) == set()


async def test_a_gpu_that_does_not_answer_costs_the_others_nothing() -> None:
    one, other = BusyGpu("GPU-0", [1]), BusyGpu("GPU-1", [5])
    scanner = ProcessScanner()
    await scanner.scan([one, other])
    one.fails = True
    other.pids.add(6)
    assert set(await scanner.scan([one, other])) == {6}
    one.fails = False
    one.pids.add(2)
    assert set(await scanner.scan([one, other])) == {2}


async def test_a_look_that_hangs_is_not_waited_for_and_comes_with_a_later_one() -> None:
    gpu, scanner = BusyGpu("GPU-0", [1]), ProcessScanner()
    await scanner.scan([gpu])
    gpu.released.clear()
    gpu.pids.add(2)
    assert set(await scanner.scan([gpu])) == set()
    assert scanner.is_stuck
    gpu.released.set()
    assert [pid for _ in range(3) for pid in await scanner.scan([gpu])] == [2]
    assert not scanner.is_stuck
