"""Hangs, losses and driver unloads: each costs only what it must, and is reported once."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuFacts
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.raw import CallGroup, ClockReading, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.protocol import (
    DriverNotLoadedError,
    FailedError,
    Gpu,
    GpuLostError,
    LibraryLostError,
    SourceLostError,
)
from gpuledger_agent.gpu.threads import PollRequest, read_cpu_wait
from gpuledger_agent.gpu.worker import MAX_LEAKED, Pace
from gpuledger_agent.metrics import CALL_GROUPS_FAILED
from gpuledger_simulator.clock import ManualClock
from tests.examples import examples
from tests.fakes.gpus import (
    ANSWERS,
    PlayedGpu,
    PlayedSource,
    await_driver_thread,
    await_probe,
)
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of

BOOKS, SENSORS, READINGS, PROFILING, HEALTH = CallGroup
PATIENT_SECONDS = 30.0
IMPATIENT_SECONDS = 0.3
LOST = GpuLostError("nvmlDeviceGetMemoryInfo: GPU is lost")
UNLOADED = DriverNotLoadedError("nvmlDeviceGetMemoryInfo: Driver Not Loaded")


class Bench:
    """A driver over three played GPUs; number 0 is the faulty one."""

    def __init__(self, *, readings_seconds: float = 1.0) -> None:
        self.gpus = [PlayedGpu(f"GPU-{number}", number) for number in range(3)]
        self.sick = self.gpus[0]
        self.nvml = PlayedSource(*self.gpus)
        self.clock = ManualClock(start_ns=0)
        self.check, self.gpus_check = Check(), Check()
        self.reported: list[tuple[str, str]] = []
        self.driver = Driver(
            self.nvml,
            clock=self.clock,
            check=self.check,
            gpus_check=self.gpus_check,
            deadline_seconds=PATIENT_SECONDS,
            readings_seconds=readings_seconds,
            backoff=Backoff(first_seconds=1, max_seconds=8, jitter=lambda: 1.0),
            lost_gpu_backoff=Backoff(first_seconds=10, max_seconds=80, jitter=lambda: 1.0),
            cpu_wait=lambda _: 0.0 if self.is_cpu_free else time.monotonic(),
            report=lambda kind, uuid, _: self.reported.append((kind, uuid)),
        )
        self.hanging: list[threading.Event] = []
        self.is_cpu_free = True
        """Whether threads get a CPU as soon as they need one; otherwise they always wait."""

    def hang(self, *groups: CallGroup) -> threading.Event:
        self.hanging.append(self.sick.hang(*groups))
        self.be_patient(IMPATIENT_SECONDS)
        return self.hanging[-1]

    def be_patient(self, seconds: float = PATIENT_SECONDS) -> None:
        self.driver.pool.deadline_seconds = seconds

    def release(self, released: threading.Event) -> None:
        """Let the calls return, and wait until the GPU's thread is back."""
        self.sick.hangs = {}
        released.set()
        workers = [worker for worker in self.driver.pool.workers if worker.gpu is self.sick]
        backs = [threading.Event() for _ in workers]
        for worker, back in zip(workers, backs, strict=True):
            worker.thread.submit(back.set)
        assert all(back.wait(HANG_SECONDS) for back in backs)

    async def answers(self) -> dict[str, RawGpuSample] | None:
        poll = await self.driver.poll({})
        self.clock.advance(1)
        return None if poll is None else {sample.uuid: sample for sample in poll.samples}

    async def query(self) -> list[str] | None:
        answers = await self.answers()
        return None if answers is None else sorted(uuid[-1] for uuid in answers)

    def seen(self) -> dict[str, int]:
        """Return how often each GPU was queried."""
        return {gpu.uuid: gpu.requests[BOOKS] for gpu in self.gpus}

    async def query_until(self, expected: list[str] | None, *, most: int = 400) -> int:
        """Query until the result is as expected; return how often it was not."""
        for requested in range(most):
            if await self.query() == expected:
                return requested
        raise AssertionError(f"never {expected}")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for hanging in made.hanging:
        hanging.set()
    made.driver.close()


async def test_all_groups_are_queried_at_first_and_health_only_at_its_times(bench: Bench) -> None:
    answers = await bench.answers()
    assert answers
    merged = {field for group in ANSWERS.values() for field in group}
    assert all(getattr(answers["GPU-0"], field) for field in merged)
    for _ in range(30):
        await bench.query()
    assert [gpu.requests[HEALTH] for gpu in bench.gpus] == [4, 4, 4]
    assert [gpu.requests[SENSORS] for gpu in bench.gpus] == [31, 31, 31]


async def test_the_health_of_each_gpu_is_queried_at_another_time(bench: Bench) -> None:
    await bench.query()
    queried_at: dict[str, int] = {}
    for second in range(10):
        await bench.query()
        for gpu in bench.gpus:
            if gpu.requests[HEALTH] == 2:
                queried_at.setdefault(gpu.uuid, second)
    assert len(set(queried_at.values())) == len(bench.gpus)


async def test_detailed_readings_have_their_own_pace_and_belong_only_to_their_tick() -> None:
    bench = Bench(readings_seconds=5)
    queried_at: dict[str, list[int]] = {gpu.uuid: [] for gpu in bench.gpus}
    for second in range(21):
        answers = await bench.answers() or {}
        for uuid, sample in answers.items():
            assert sample.sensors, "the values of the tick itself are queried each time"
            assert bool(sample.readings) == bool(sample.profiling)
            if sample.readings:
                queried_at[uuid].append(second)
    bench.driver.close()
    assert {seconds[0] for seconds in queried_at.values()} == {0}, "all at first"
    later = [seconds[1:] for seconds in queried_at.values()]
    assert all(b - a == 5 for seconds in later for a, b in pairwise(seconds))
    assert len({seconds[0] for seconds in later}) == len(bench.gpus), "and each at another time"


@pytest.mark.parametrize("early_ns", [0, 40_000_000])
def test_readings_with_the_period_of_a_tick_are_due_in_every_tick_even_an_early_one(
    early_ns: int,
) -> None:
    pace = Pace(origin_ns=0, period_ns=NS_PER_SECOND)
    ticks = [number * NS_PER_SECOND - early_ns * (number % 2) for number in range(1, 20)]
    assert all(pace.take(now_ns) for now_ns in ticks)


@pytest.mark.parametrize("group", [READINGS, PROFILING])
async def test_a_later_group_that_hangs_loses_only_its_own_readings(
    bench: Bench, group: CallGroup
) -> None:
    await bench.query()
    bench.hang(group)
    # Long enough for a probe to be due many times.
    for _ in range(60):
        answers = await bench.answers()
        assert answers
        assert sorted(answers) == ["GPU-0", "GPU-1", "GPU-2"]
        assert answers["GPU-0"].energy_millijoules == 1
        assert bool(answers["GPU-0"].readings) == (group is not READINGS)
        assert answers["GPU-1"].profiling
    assert bench.sick.requests[group] == 2, "it is not queried again while its thread hangs"
    assert bench.gpus_check.is_ok
    assert f"{group.value} of GPU-0" in bench.gpus_check.detail
    assert not bench.reported


async def test_a_group_that_hung_is_queried_again_after_its_call_has_returned(bench: Bench) -> None:
    await bench.query()
    released = bench.hang(READINGS)
    await bench.query()
    await bench.query()
    bench.release(released)
    bench.be_patient()
    # On a busy machine other groups may also have been late while deadlines were short.
    for _ in range(400):
        answers = await bench.answers() or {}
        if "GPU-0" in answers and answers["GPU-0"].readings:
            break
    else:
        pytest.fail("never queried again")


@pytest.mark.parametrize("error", [ValueError("a bug of ours"), LOST])
async def test_an_error_of_a_later_group_loses_only_its_own_readings(
    bench: Bench, error: Exception
) -> None:
    bench.sick.errors[PROFILING] = error
    for _ in range(5):
        answers = await bench.answers()
        assert answers
        assert (answers["GPU-0"].readings, answers["GPU-0"].profiling) == ({"throttled": 2}, {})
    assert bench.sick.requests[PROFILING] == 3, "the breaker is open"
    assert bench.nvml.tried == 1


async def test_a_gpu_with_hanging_usage_calls_is_waited_for_once_and_reported_lost_once(
    bench: Bench,
) -> None:
    await bench.query()
    bench.hang(BOOKS)
    loop = asyncio.get_running_loop()
    assert await bench.query() == ["1", "2"]
    bench.be_patient()
    began = loop.time()
    for _ in range(4):
        assert await bench.query() == ["1", "2"]
    assert loop.time() - began < PATIENT_SECONDS
    assert bench.sick.requests[BOOKS] == 2
    assert bench.reported == [("gpu_lost", "GPU-0")]
    assert bench.nvml.tried == 1, "no restart disturbs the others"


async def test_a_gpu_is_not_lost_while_its_thread_waits_for_a_cpu(bench: Bench) -> None:
    await bench.query()
    bench.is_cpu_free = False
    released = bench.hang(BOOKS, READINGS)
    for _ in range(6):
        assert await bench.query() == ["1", "2"]
    bench.be_patient()
    assert await bench.query() == ["1", "2"]
    bench.release(released)
    await bench.query_until(["0", "1", "2"])
    assert not bench.reported
    assert len(bench.sick.threads) == 1, "its thread is not replaced"


async def test_a_gpu_whose_call_hangs_on_a_busy_node_is_lost_nevertheless(bench: Bench) -> None:
    """While a call hangs, its thread does not wait for a CPU."""
    await bench.query()
    bench.is_cpu_free = False
    bench.hang(BOOKS)
    await bench.query()
    bench.is_cpu_free = True
    for _ in range(3):
        await bench.query()
    assert bench.reported == [("gpu_lost", "GPU-0")]


async def test_a_gpu_whose_thread_has_not_started_a_call_is_not_lost(bench: Bench) -> None:
    await bench.query()
    released = threading.Event()
    bench.hanging.append(released)
    for worker in bench.driver.pool.workers:
        worker.thread.submit(released.wait)
    bench.be_patient(IMPATIENT_SECONDS)
    for _ in range(6):
        assert await bench.query() == []
    bench.be_patient()
    bench.release(released)
    await bench.query_until(["0", "1", "2"])
    assert not bench.reported
    assert bench.nvml.tried == 1


async def test_a_gpu_is_not_lost_if_the_event_loop_is_late(bench: Bench) -> None:
    failures = CALL_GROUPS_FAILED.labels(gpu_uuid="GPU-0", group="usage", reason="deadline")
    before = value_of(failures)
    await bench.query()
    released = bench.hang(BOOKS)

    def block() -> None:
        end_seconds = time.monotonic() + 3 * IMPATIENT_SECONDS
        while time.monotonic() < end_seconds:
            pass

    asyncio.get_running_loop().call_soon(block)
    assert "GPU-0" not in (await bench.answers() or {})
    bench.release(released)
    bench.be_patient()
    await bench.query_until(["0", "1", "2"])
    assert value_of(failures) == before


def test_the_kernel_counts_how_long_a_thread_waits_for_a_cpu() -> None:
    assert read_cpu_wait(threading.get_native_id()) >= 0
    assert read_cpu_wait(-1) == 0, "unknown counts as no wait"


@pytest.mark.parametrize(
    ("waits_in", "is_starved"),
    [(BOOKS, False), (SENSORS, True)],
    ids=["a former group", "the current group"],
)
@pytest.mark.parametrize("waits_for", ["a CPU", "the event loop"])
def test_a_call_is_starved_only_by_waiting_that_falls_into_its_own_group(
    *, waits_in: CallGroup, is_starved: bool, waits_for: str
) -> None:
    waited_seconds = 0.0

    class Waiting(PlayedGpu):
        @override
        def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
            nonlocal waited_seconds
            if group is waits_in and waits_for == "a CPU":
                waited_seconds += PATIENT_SECONDS
            elif group is waits_in:
                request.overslept_seconds += PATIENT_SECONDS
            found[group] = request.is_starved
            return super().query(group, cursor)

    found: dict[CallGroup, bool] = {}
    request = PollRequest.to(Waiting("GPU-0", 0), SampleCursor(), (BOOKS, SENSORS))
    request.cpu_wait = lambda _: waited_seconds
    request.timeouts = dict.fromkeys((BOOKS, SENSORS), PATIENT_SECONDS)
    request.run(pass_on=lambda: None, done=lambda: None)
    assert found[SENSORS] is is_starved


async def test_a_gpu_that_hung_is_recovered_by_a_probe_that_delays_no_tick(bench: Bench) -> None:
    await bench.query()
    released = bench.hang(BOOKS)
    for _ in range(4):
        await bench.query()
    bench.release(released)
    bench.be_patient()
    await bench.query_until(["0", "1", "2"])
    assert bench.reported == [("gpu_lost", "GPU-0"), ("gpu_recovered", "GPU-0")]
    assert bench.check.is_ok


async def test_a_gpu_that_hung_for_long_is_back_within_30_seconds(bench: Bench) -> None:
    await bench.query()
    released = bench.hang(BOOKS)
    await bench.query()
    bench.be_patient()
    for _ in range(400):
        await bench.query()
    bench.release(released)
    for _ in range(32):
        await bench.query()
        bench.release(released)
    assert await bench.query() == ["0", "1", "2"]


async def test_however_long_a_gpu_hangs_few_threads_are_leaked(bench: Bench) -> None:
    await bench.query()
    bench.hang(BOOKS)
    await bench.query()
    bench.be_patient()
    for _ in range(5_000):
        assert await bench.query() == ["1", "2"]
    assert len(bench.sick.threads) == MAX_LEAKED + 1
    assert len(bench.gpus[1].threads) == 1


async def test_other_gpus_lose_no_tick_while_the_library_restarts_for_a_lost_gpu(
    bench: Bench,
) -> None:
    await bench.query()
    bench.sick.errors[BOOKS] = LOST
    bench.nvml.gone = {"GPU-0"}
    for _ in range(100):
        assert await bench.query() == ["1", "2"]
    assert 3 <= bench.nvml.tried <= 6, "retried at growing intervals"
    bench.nvml.gone.clear()
    bench.sick.errors.clear()
    await bench.query_until(["0", "1", "2"])
    assert bench.reported == [("gpu_lost", "GPU-0"), ("gpu_recovered", "GPU-0")]


async def test_a_gpu_that_answers_only_probes_is_tried_at_growing_intervals(bench: Bench) -> None:
    await bench.query()
    bench.sick.errors[BOOKS] = LOST
    bench.nvml.gone, bench.nvml.answers_probes = {"GPU-0"}, True
    for _ in range(1000):
        assert await bench.query() == ["1", "2"]
        await_probe(bench.driver)
        await_driver_thread(bench.driver)
    assert bench.nvml.probed >= 40
    assert bench.nvml.tried < 40


async def test_restarts_for_a_lost_gpu_are_logged_only_if_the_gpus_have_changed(
    bench: Bench,
) -> None:
    with capture_logs() as logs:
        await bench.query()
        bench.sick.errors[BOOKS] = LOST
        bench.nvml.gone = {"GPU-0"}
        for _ in range(100):
            await bench.query()
        bench.nvml.gone.clear()
        bench.sick.errors.clear()
        await bench.query_until(["0", "1", "2"])
    assert bench.nvml.tried > 4
    starts = [line for line in logs if line["event"] == "source_opened"]
    assert [line["count"] for line in starts] == [3, 2, 3]
    assert all("unbind_event_error" in line for line in starts)


async def test_the_library_is_not_restarted_for_a_lost_gpu_while_another_one_hangs(
    bench: Bench,
) -> None:
    await bench.query()
    released = bench.hang(READINGS)
    await bench.query()
    bench.gpus[1].errors[BOOKS] = LOST
    for _ in range(50):
        assert await bench.query() == ["0", "2"]
    assert bench.nvml.tried == 1
    bench.gpus[1].errors.clear()
    bench.release(released)
    bench.be_patient()
    await bench.query_until(["0", "1", "2"])


async def test_the_library_is_not_restarted_for_a_gpu_that_hangs_in_the_start_itself(
    bench: Bench,
) -> None:
    bench.nvml.gone, bench.nvml.is_stuck = {"GPU-1"}, True
    await bench.query()
    for _ in range(200):
        assert await bench.query() == ["0", "2"]
    assert bench.nvml.tried == 1
    bench.nvml.gone, bench.nvml.is_stuck = set(), False
    await bench.query_until(["0", "1", "2"])


async def test_a_gpu_that_is_missing_after_a_restart_is_lost(bench: Bench) -> None:
    await bench.query()
    bench.nvml.gone = {"GPU-0"}
    bench.gpus[1].errors[BOOKS] = LibraryLostError("nvmlDeviceGetSamples: Uninitialized")
    await bench.query()
    bench.gpus[1].errors.clear()
    await bench.query_until(["1", "2"])
    assert ("gpu_lost", "GPU-0") in bench.reported


async def test_a_reloaded_driver_is_reported_once_per_gpu(bench: Bench) -> None:
    await bench.query()
    bench.clock.advance(60)
    for gpu in bench.gpus:
        gpu.errors[BOOKS] = UNLOADED
    bench.nvml.error = UNLOADED
    assert await bench.query() == []
    for _ in range(10):
        assert await bench.query() is None
    bench.nvml.error = None
    for gpu in bench.gpus:
        gpu.errors.clear()
    await bench.query_until(["0", "1", "2"])
    assert bench.reported == [("driver_reloaded", gpu.uuid) for gpu in bench.gpus]


async def test_if_no_gpu_answers_the_library_is_restarted(bench: Bench) -> None:
    await bench.query()
    bench.clock.advance(60)
    bench.be_patient(IMPATIENT_SECONDS)
    released = threading.Event()
    bench.hanging.append(released)
    for gpu in bench.gpus:
        gpu.hangs[BOOKS] = released
    for _ in range(4):
        await bench.query()
    assert bench.nvml.tried == 2


@pytest.mark.parametrize("name", ["INDEX:0", "PCI:0000:1b:00", "GPU-0"])
async def test_a_gpu_that_is_lost_at_the_start_is_reported_and_so_is_its_recovery(
    bench: Bench, name: str
) -> None:
    bench.nvml.gone, bench.nvml.names = {"GPU-0"}, {"GPU-0": name}
    await bench.query()
    assert bench.gpus_check.detail == f"1 GPUs do not answer: {name}"
    for _ in range(3):
        bench.clock.advance(100)
        await bench.query()
    assert bench.reported == [("gpu_lost", name)]
    bench.nvml.gone = set()
    for _ in range(3):
        bench.clock.advance(100)
        await bench.query()
    assert bench.reported == [("gpu_lost", name), ("gpu_recovered", name)]
    assert bench.gpus_check.is_ok
    assert sorted(bench.driver.known) == ["GPU-0", "GPU-1", "GPU-2"]


async def test_a_gpu_that_is_lost_at_the_start_recovers_under_its_uuid_at_any_index(
    bench: Bench,
) -> None:
    """The driver may number its GPUs differently when it is opened again."""
    bench.nvml.gone, bench.nvml.names = {"GPU-0", "GPU-1"}, {"GPU-0": "GPU-0", "GPU-1": "GPU-1"}
    await bench.query()
    bench.nvml.gone = {"GPU-1"}
    bench.gpus[0].index, bench.gpus[1].index = 1, 0
    for _ in range(3):
        bench.clock.advance(100)
        await bench.query()
    lost = [("gpu_lost", "GPU-0"), ("gpu_lost", "GPU-1")]
    assert bench.reported == [*lost, ("gpu_recovered", "GPU-0")]


async def test_a_gpu_that_answered_once_is_lost_only_under_its_uuid(bench: Bench) -> None:
    await bench.query()
    bench.sick.errors[BOOKS] = LOST
    bench.nvml.gone = {"GPU-0"}
    for _ in range(3):
        bench.clock.advance(100)
        await bench.query()
    assert bench.reported == [("gpu_lost", "GPU-0")]


async def test_a_breaker_is_logged_once_open_and_once_closed_across_restarts(
    bench: Bench,
) -> None:
    with capture_logs() as logs:
        await bench.query()
        bench.clock.advance(60)
        for gpu in bench.gpus:
            gpu.errors[BOOKS] = FailedError("nvmlDeviceGetMemoryInfo: Timeout")
        for _ in range(20):
            bench.clock.advance(1)
            await bench.query()
        assert bench.nvml.tried > 1
        for gpu in bench.gpus:
            gpu.errors = {}
        for _ in range(20):
            bench.clock.advance(100)
            await bench.query()
    reported = sorted((line["event"], line["gpu"]) for line in logs if "breaker" in line["event"])
    names = ["GPU-0", "GPU-1", "GPU-2"]
    assert reported == [
        (event, gpu) for event in ("breaker_closed", "breaker_opened") for gpu in names
    ]


async def test_no_tick_waits_for_a_hanging_start_longer_than_its_deadline(
    bench: Bench,
) -> None:
    bench.driver.deadline_seconds = 0.01
    bench.nvml.opens = threading.Event()
    for _ in range(5):
        assert await bench.query() is None
    assert bench.nvml.tried == 1
    assert bench.check.detail == "opening the library takes too long"
    bench.nvml.opens.set()
    bench.driver.deadline_seconds = PATIENT_SECONDS
    assert await bench.query() == ["0", "1", "2"]


async def test_a_driver_without_gpus_does_not_count_as_idle(bench: Bench) -> None:
    bench.nvml.gpus.clear()
    for _ in range(2):
        began_seconds = time.monotonic()
        assert await bench.query() == []
        assert bench.driver.idle_seconds <= time.monotonic() - began_seconds


async def test_users_of_the_library_start_after_it_and_end_before_it() -> None:
    log: list[str] = []

    class Logging(PlayedSource):
        @override
        def open(self) -> Sequence[Gpu]:
            log.append("open")
            return super().open()

        @override
        def close(self) -> None:
            log.append("close")

    class User:
        def opened(self, gpus: object) -> None:
            log.append("opened")

        def closing(self) -> None:
            log.append("closing")
            raise ValueError("a bug that must not keep the library open")

    driver = Driver(
        Logging(PlayedGpu("GPU-0", 0)),
        clock=ManualClock(start_ns=0),
        check=Check(),
        deadline_seconds=PATIENT_SECONDS,
        backoff=Backoff(),
        listeners=[User()],
    )
    await driver.poll({})
    closing = driver.close()
    assert closing
    closing.result(timeout=HANG_SECONDS)
    assert log == ["closing", "close", "open", "opened", "closing", "close"]


async def test_the_inventory_is_returned_when_it_has_changed(bench: Bench) -> None:
    for gpu in bench.gpus:
        gpu.facts = GpuFacts(uuid=gpu.uuid, index=gpu.index, instances=[], capabilities=[])
    assert bench.driver.inventory() is None
    await bench.query()
    first = bench.driver.inventory()
    assert first
    assert [gpu.uuid for gpu in first.gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    assert first.versions == {"driver_version": "1.0"}
    assert not first.gpus[0].capabilities[-1].supported, "unbind events are not supported here"
    for _ in range(20):
        await bench.query()
        assert bench.driver.inventory() is None
    assert bench.sick.facts
    bench.sick.facts = replace(bench.sick.facts, ecc_enabled=True)
    news = []
    for _ in range(20):
        await bench.query()
        news.append(bench.driver.inventory())
    (second,) = filter(None, news)
    assert [gpu.ecc_enabled for gpu in second.gpus] == [True, None, None]


@pytest.mark.parametrize(("group", "model"), [(BOOKS, None), (HEALTH, "H100")])
async def test_the_first_inventory_lists_every_gpu_that_was_found(
    bench: Bench, group: CallGroup, model: str | None
) -> None:
    """A GPU that a version does not list counts as removed."""
    for gpu in bench.gpus:
        gpu.model = "H100"
        gpu.facts = GpuFacts(
            uuid=gpu.uuid, index=gpu.index, model="H100", serial="1", instances=[], capabilities=[]
        )
    bench.sick.errors[group] = FailedError("nvmlDeviceGetMemoryInfo: Timeout")
    versions = []
    for second in range(80):
        if second == 30:
            bench.sick.errors.clear()
        await bench.query()
        versions.append(bench.driver.inventory())
    first, second_ = filter(None, versions)
    for node, of_sick in ((first, (model, None)), (second_, ("H100", "1"))):
        assert [gpu.uuid for gpu in node.gpus] == ["GPU-0", "GPU-1", "GPU-2"]
        assert [(gpu.model, gpu.serial) for gpu in node.gpus] == [of_sick, *[("H100", "1")] * 2]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, LOST, UNLOADED]),
            st.sets(st.sampled_from(["GPU-0", "GPU-1"])),
            st.sampled_from([None, UNLOADED]),
            st.integers(min_value=1, max_value=5),
        ),
        max_size=8,
    )
)
@examples(40)
async def test_losses_and_recoveries_alternate_and_the_gpus_come_back_whatever_happens(
    happenings: list[tuple[SourceLostError | None, set[str], LibraryLostError | None, int]],
) -> None:
    bench = Bench()
    try:
        for error, gone, unloaded, ticks in happenings:
            bench.sick.errors = {BOOKS: error} if error else {}
            bench.nvml.gone, bench.nvml.error = gone, unloaded
            for _ in range(ticks):
                await bench.query()
        bench.sick.errors = {}
        bench.nvml.gone, bench.nvml.error = set(), None
        await bench.query_until(["0", "1", "2"])
    finally:
        bench.driver.close()
    for gpu in bench.gpus:
        of_gpu = [kind for kind, uuid in bench.reported if uuid == gpu.uuid]
        turns = [kind for kind in of_gpu if kind in ("gpu_lost", "gpu_recovered")]
        assert turns == ["gpu_lost", "gpu_recovered"] * (len(turns) // 2)


async def test_the_time_of_a_tick_is_when_the_gpus_were_queried_however_long_it_waited(
    bench: Bench,
) -> None:
    class SlowCall(threading.Event):
        @override
        def wait(self, timeout: float | None = None) -> bool:
            bench.clock.advance(1)
            return True

    bench.sick.hangs = {BOOKS: SlowCall()}
    began = ClockReading.read(bench.clock)
    poll = await bench.driver.poll({})
    assert poll is not None
    assert poll.at == began
    assert bench.clock.monotonic_ns() > began.monotonic_ns
