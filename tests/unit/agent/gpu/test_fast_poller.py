"""Fast polls between ticks: the results of GPUs, and that a hanging call delays no tick."""

import threading
from collections.abc import Collection, Sequence

from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.raw import ClockReading, FastPoll, SampleCursor
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.fast_poller import FastPoller
from gpuledger_agent.gpu.protocol import FailedError
from gpuledger_agent.metrics import FAST_POLLS_FAILED
from gpuledger_simulator.clock import ManualClock
from tests.fakes.gpus import PlayedGpu, PlayedSource
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of

CURSOR = SampleCursor(process_us=7)


class BusyGpu(PlayedGpu):
    """A GPU that a test can make fail or hang."""

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid, 0)
        self.fails = False
        self.error: Exception = FailedError("no")
        self.polls: list[threading.Thread] = []
        self.released = threading.Event()
        self.released.set()

    @override
    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        self.polls.append(threading.current_thread())
        self.released.wait(HANG_SECONDS)
        if self.fails:
            raise self.error
        return FastPoll(uuid=self.uuid, at=at, since_us=cursor.process_us if cursor else 0)


async def polled(
    poller: FastPoller, gpus: Sequence[BusyGpu], *, clock: ManualClock | None = None
) -> Collection[str]:
    clock = clock or ManualClock(start_ns=0)
    polls = await poller.poll([(gpu, CURSOR) for gpu in gpus], clock)
    assert {poll.since_us for poll in polls} <= {CURSOR.process_us}
    return {poll.uuid for poll in polls}


async def test_a_gpu_that_does_not_answer_does_not_affect_the_others() -> None:
    one, other = BusyGpu("GPU-0"), BusyGpu("GPU-1")
    poller = FastPoller()
    assert await polled(poller, [one, other]) == {"GPU-0", "GPU-1"}
    one.fails = True
    assert await polled(poller, [one, other]) == {"GPU-1"}
    one.fails = False
    assert await polled(poller, [one, other]) == {"GPU-0", "GPU-1"}


async def test_an_error_with_one_gpu_loses_only_its_own_polls() -> None:
    one, other, poller = BusyGpu("GPU-of-a-mistake"), BusyGpu("GPU-1"), FastPoller()
    one.fails, one.error = True, ValueError("an answer of only this driver")
    failed = value_of(FAST_POLLS_FAILED)
    with capture_logs() as lines:
        polls = [*await poller.poll([(one, CURSOR), (other, CURSOR)], ManualClock(start_ns=0))]
    assert [(poll.uuid, poll.failed) for poll in polls] == [(one.uuid, True), ("GPU-1", False)]
    assert value_of(FAST_POLLS_FAILED) - failed == 1
    assert [(line["event"], line["gpu"], line["count"]) for line in lines] == [
        ("fast_poll_failed", one.uuid, 1)
    ]


async def test_a_hanging_poll_is_not_waited_for_and_its_result_comes_with_a_later_one() -> None:
    gpu, poller = BusyGpu("GPU-0"), FastPoller()
    gpu.released.clear()
    assert await polled(poller, [gpu]) == set()
    assert poller.is_stuck
    gpu.released.set()
    assert [uuid for _ in range(3) for uuid in await polled(poller, [gpu])][:1] == ["GPU-0"]
    assert not poller.is_stuck


async def test_if_one_gpu_hangs_the_others_are_still_polled() -> None:
    one, other, poller = BusyGpu("GPU-0"), BusyGpu("GPU-1"), FastPoller()
    clock = ManualClock(start_ns=0)
    one.released.clear()
    assert await polled(poller, [one, other], clock=clock) == set()
    clock.advance(3.0)
    assert await polled(poller, [one, other], clock=clock) == {"GPU-1"}
    assert poller.is_stuck
    one.released.set()
    one.polls[0].join(HANG_SECONDS)
    assert await polled(poller, [one, other], clock=clock) == {"GPU-0", "GPU-1"}
    assert not poller.is_stuck


async def test_after_its_end_no_further_gpu_is_polled_and_the_thread_ends_with_its_call() -> None:
    one, other, poller = BusyGpu("GPU-0"), BusyGpu("GPU-1"), FastPoller()
    one.released.clear()
    assert await polled(poller, [one, other]) == set()
    poller.end()
    stuck = [poller.is_stuck]
    one.released.set()
    one.polls[0].join(HANG_SECONDS)
    assert not one.polls[0].is_alive()
    assert [*stuck, poller.is_stuck] == [True, False]
    assert other.polls == []
    assert await polled(poller, [one, other]) == {"GPU-0", "GPU-1"}


async def test_while_a_fast_poll_hangs_the_driver_is_not_closed_and_its_results_are_discarded() -> (
    None
):
    gpu, clock = BusyGpu("GPU-0"), ManualClock(start_ns=0)
    source = PlayedSource(gpu)
    driver = Driver(source, clock=clock, check=Check(), deadline_seconds=5, backoff=Backoff())
    await driver.poll({})
    gpu.released.clear()
    assert await driver.fast_poll({gpu.uuid: CURSOR}) == ()
    assert driver.close() is None
    gpu.released.set()
    gpu.polls[0].join(HANG_SECONDS)
    assert driver.take_late_polls() == ()
    assert source.is_open
