"""A GPU that hangs or is lost loses only its own readings; the library restarts when needed."""

import asyncio
import threading
from collections.abc import Iterator

import pynvml
import pytest

from gpuledger.runtime import Backoff, Check
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from tests.fakes.nvml import Altered, play_node
from tests.hanging import HANG_SECONDS


class Bench:
    """A driver over two simulated GPUs."""

    def __init__(self) -> None:
        self.clock = ManualClock(start_ns=0)
        node = play_node(self.clock, gpus=2)
        self.session = node.nvml.session
        self.uuids = [gpu.facts.uuid for gpu in node.gpus]
        self.library = Altered(node.nvml)
        self.check, self.gpus_check = Check(name="nvml"), Check()
        self.driver = Driver(
            NvmlSession(self.library),
            clock=self.clock,
            check=self.check,
            gpus_check=self.gpus_check,
            deadline_seconds=HANG_SECONDS,
            backoff=Backoff(first_seconds=1, max_seconds=8, jitter=lambda: 1.0),
        )

    async def query(self) -> list[int] | None:
        poll = await self.driver.poll({})
        return None if poll is None else sorted(sample.index for sample in poll.samples)

    async def query_after_events(self) -> list[int] | None:
        """Query once the last tick's poll of driver events has returned.

        A tick does not reopen the library before that.
        """
        await asyncio.wrap_future(self.driver.lifecycle.worker.start(lambda: None))
        return await self.query()

    def thread_is_back(self, index: int) -> None:
        """Wait until a GPU's thread has finished its work."""
        (worker,) = [worker for worker in self.driver.pool.workers if worker.gpu.index == index]
        back = threading.Event()
        worker.thread.submit(back.set)
        assert back.wait(HANG_SECONDS)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.driver.close()


async def test_all_gpus_answer(bench: Bench) -> None:
    assert await bench.query() == [0, 1]
    assert (bench.check.is_ok, bench.check.detail) == (True, "2 GPUs")
    assert await bench.query() == [0, 1]
    assert bench.library.calls["nvmlInit"] == 1


async def test_a_gpu_that_hangs_loses_only_its_own_readings(bench: Bench) -> None:
    await bench.query()
    bench.driver.pool.deadline_seconds = 0.05
    bench.library.hanging[0] = threading.Event()
    assert await bench.query() == [1]
    assert (bench.check.is_ok, bench.check.detail) == (True, "1 GPUs")
    assert not bench.gpus_check.is_ok
    assert bench.gpus_check.detail == f"no answer in time from {bench.uuids[0]}"
    assert await bench.query() == [1]
    assert bench.library.calls["nvmlInit"] == 1
    bench.library.hanging.pop(0).set()
    bench.thread_is_back(0)
    bench.driver.pool.deadline_seconds = HANG_SECONDS
    assert await bench.query() == [0, 1]
    assert bench.gpus_check.is_ok


async def test_if_no_gpu_answers_both_checks_fail_with_a_detail(bench: Bench) -> None:
    """Each check that is not ok must log a line, so it must fail instead of waiting."""
    await bench.query()
    bench.library.lost = {0, 1}
    await bench.query()
    assert (bench.check.has_failed, bench.gpus_check.has_failed) == (True, True)
    assert bench.gpus_check.detail == "no GPU answers, see nvml"


async def test_if_the_library_does_not_start_both_checks_fail(bench: Bench) -> None:
    bench.library.refuse("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert await bench.query() is None
    assert (bench.check.has_failed, bench.gpus_check.has_failed) == (True, True)
    bench.library.functions.clear()
    bench.clock.advance(8)
    await bench.query()
    assert (bench.check.is_ok, bench.gpus_check.is_ok) == (True, True)


async def test_a_lost_gpu_restarts_the_library_after_a_wait(bench: Bench) -> None:
    await bench.query()
    bench.clock.advance(60)
    bench.library.lost.add(0)
    assert await bench.query_after_events() == [1]
    assert (bench.check.is_ok, bench.gpus_check.is_ok) == (True, False)
    assert await bench.query_after_events() == [1]
    assert bench.library.calls["nvmlInit"] == 2
    assert bench.gpus_check.detail == f"1 GPUs do not answer: {bench.uuids[0]}"
    bench.library.lost.clear()
    assert await bench.query_after_events() == [1]
    bench.clock.advance(60)
    assert await bench.query_after_events() == [1]
    assert await bench.query_after_events() == [0, 1]
    assert bench.library.calls["nvmlInit"] == 3
    assert bench.gpus_check.is_ok


async def test_a_library_that_does_not_start_is_retried_with_a_growing_wait(
    bench: Bench,
) -> None:
    bench.library.refuse("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    tried = []
    for _ in range(20):
        before = bench.library.calls["nvmlInit"]
        assert await bench.query() is None
        tried.append(bench.library.calls["nvmlInit"] - before)
        bench.clock.advance(1)
    assert [second for second, tries in enumerate(tried) if tries] == [0, 1, 3, 7, 15]
    assert bench.check.detail == "nvmlInit: Driver Not Loaded"
    bench.library.functions.clear()
    bench.clock.advance(8)
    assert await bench.query() == [0, 1]


async def test_closing_releases_the_driver(bench: Bench) -> None:
    await bench.query()
    assert bench.session.users
    closing = bench.driver.close()
    assert closing
    closing.result(timeout=HANG_SECONDS)
    assert not bench.session.users
