"""A pod's GPU-seconds are right with every kind of driver whose answers allow it."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from _pytest.mark import ParameterSet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import BusyMethod, NodeSample
from gpuledger_agent.core.raw import (
    CallGroup,
    ClockReading,
    FastPoll,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.metrics import READINGS_DROPPED
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import SimulatedNode
from tests.examples import examples
from tests.metric_values import value_of
from tests.ticks import take_fast_polls, tick_of
from tests.truth_runs import (
    CLASSES,
    DRIVERS,
    ESTIMATED,
    FURTHER,
    MODELLED,
    RUN_SECONDS,
    UNMEASURED,
    Errors,
    errors_of,
    play_cell,
    play_lives,
    watch,
)

PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "accuracy.md").read_text()
SHARED = [kind for kind in CLASSES if not kind.startswith("one pod")]
MEASURED = [name for name in DRIVERS if name not in UNMEASURED | MODELLED | set(ESTIMATED)]
JOULES = ["each window", "mean since the question", "windows of 1 s"]


def cells(names: Sequence[str]) -> list[ParameterSet]:
    """Return each driver with each class of runs; all but one class of each driver are extended.

    The first driver has all classes, the others take turns.
    """
    made = []
    for number, name in enumerate(names):
        for at, kind in enumerate(CLASSES):
            is_sampled = number == 0 or at == number % len(CLASSES)
            marks = () if is_sampled else (pytest.mark.extended,)
            made.append(pytest.param(name, kind, marks=marks))
    return made


@cache
def errors_in(kind: str, driver: str) -> Errors:
    """Play a cell with ticks of a second, once for all checks."""
    return errors_of(
        play_cell(kind, DRIVERS[driver], sampling_interval_seconds=1.0, seed=3),
        sampling_interval_seconds=1.0,
    )


drivers = st.fixed_dictionaries(
    {
        "processes": st.sampled_from(["windows", "mean", "newest", "mean_of_used"]),
        "window_seconds": st.sampled_from([1 / 6, 0.25, 1.0]),
        "stamps": st.sampled_from(["wall", "boot"]),
        "rounding": st.sampled_from(["nearest", "down"]),
        "ring_idle": st.sampled_from(["kept", "skipped", "dry"]),
        "ring_samples": st.sampled_from([100, 4096]),
        "empty_answer": st.sampled_from(["not_found", "success"]),
    }
)


def test_the_page_shows_how_a_scenario_plays_each_driver() -> None:
    text = PAGE.partition("<!-- drivers:begin -->\n")[2].partition("<!-- drivers:end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert {name: yaml.safe_load(fields.split("`")[1]) for name, _, _, fields in rows} == DRIVERS


each_run = given(
    drivers, st.sampled_from(sorted(CLASSES)), st.sampled_from([1.0, 5.0, 10.0]), st.integers()
)


@settings(examples(10), derandomize=True)
@each_run
def test_a_pod_is_booked_what_it_used_to_one_percent_whatever_its_driver_answers(
    driver: Mapping[str, Any], kind: str, sampling_interval_seconds: float, seed: int
) -> None:
    """Over each 60 seconds, relative to the device's time; the agent does not know the driver."""
    check_one_percent(driver, kind, sampling_interval_seconds, seed)


@pytest.mark.extended
@examples(100)
@each_run
def test_a_pod_is_booked_what_it_used_to_one_percent_with_many_more_drivers(
    driver: Mapping[str, Any], kind: str, sampling_interval_seconds: float, seed: int
) -> None:
    # Known failures, see docs/concepts/accuracy.md.
    assume(driver["window_seconds"] != 1.0 or driver["rounding"] != "down")
    assume(driver["window_seconds"] != 0.25 or driver["processes"] != "newest")
    check_one_percent(driver, kind, sampling_interval_seconds, seed)


def check_one_percent(
    driver: Mapping[str, Any], kind: str, sampling_interval_seconds: float, seed: int
) -> None:
    errors = errors_of(
        play_cell(kind, driver, sampling_interval_seconds=sampling_interval_seconds, seed=seed),
        sampling_interval_seconds=sampling_interval_seconds,
    )
    assert errors.largest.busy_ns <= 0.01


LEAVES_OUT_IDLE_SECONDS = {
    "processes": "windows",
    "window_seconds": 1.0,
    "stamps": "wall",
    "rounding": "nearest",
    "ring_idle": "skipped",
    "ring_samples": 100,
    "empty_answer": "not_found",
}


ROUNDS_THE_NEWEST_DOWN = {
    "processes": "newest",
    "window_seconds": 0.25,
    "stamps": "wall",
    "rounding": "down",
    "ring_idle": "kept",
    "ring_samples": 4096,
    "empty_answer": "not_found",
}


def test_booked_use_is_right_to_one_percent_if_a_driver_rounds_the_newest_window_down() -> None:
    check_one_percent(ROUNDS_THE_NEWEST_DOWN, "two pods, bursts", 5.0, 605786)


@pytest.mark.parametrize("ring_idle", ["skipped", "dry"])
def test_booked_use_is_right_to_one_percent_if_a_driver_leaves_out_idle_seconds(
    ring_idle: str,
) -> None:
    driver = {**LEAVES_OUT_IDLE_SECONDS, "ring_idle": ring_idle}
    check_one_percent(driver, "one pod, long pauses", 1.0, -1)


@pytest.mark.parametrize(("driver", "kind"), cells(MEASURED))
def test_with_ticks_of_a_second_hardly_any_time_is_unknown(driver: str, kind: str) -> None:
    errors = errors_in(kind, driver)
    assert errors.largest.busy_ns <= 0.006
    assert errors.unknown <= 0.02


@pytest.mark.parametrize(("driver", "kind"), cells([*MEASURED, *ESTIMATED]))
def test_a_method_that_claims_to_measure_is_right_to_one_percent(driver: str, kind: str) -> None:
    assert errors_in(kind, driver).claimed <= 0.01


@pytest.mark.parametrize("seconds", [1.0, 10.0])
@pytest.mark.parametrize(
    ("driver", "method"),
    [
        ("windows of 1 s", BusyMethod.PROCESS_UTILIZATION),
        ("windows of 1 s, of processes lost", BusyMethod.PARTIAL_SAMPLES),
        ("windows of 1 s, of processes 3 s late", BusyMethod.PARTIAL_SAMPLES),
    ],
)
def test_windows_as_long_as_a_tick_show_whether_process_samples_are_missing(
    driver: str, method: BusyMethod, seconds: float
) -> None:
    """Also while processes end, for whose last windows no driver has samples."""
    errors = errors_of(
        play_cell(
            "turnover beside a pod", DRIVERS[driver], sampling_interval_seconds=seconds, seed=3
        ),
        sampling_interval_seconds=seconds,
    )
    assert errors.claimed <= 0.01
    assert set(errors.methods) - {BusyMethod.MEMORY_SHARE} == {method}


@pytest.mark.parametrize(("driver", "kind"), cells([*ESTIMATED]))
def test_the_error_of_an_estimate_stays_within_its_bound(driver: str, kind: str) -> None:
    assert errors_in(kind, driver).largest.busy_ns <= ESTIMATED[driver]


@pytest.mark.parametrize("driver", sorted(MODELLED))
@pytest.mark.parametrize("kind", SHARED)
def test_samples_that_sum_to_more_than_the_device_are_used_as_shares(
    driver: str, kind: str
) -> None:
    assert errors_in(kind, driver).largest.busy_ns <= 0.015


@pytest.mark.parametrize("driver", sorted(UNMEASURED))
def test_without_process_samples_a_single_pod_gets_everything_that_ran(driver: str) -> None:
    assert errors_in("one pod, bursts", driver).largest.busy_ns <= 0.006


@pytest.mark.parametrize(("driver", "kind"), cells(JOULES))
def test_joules_of_kernels_with_equal_draw_are_within_three_percent(driver: str, kind: str) -> None:
    """Also for bursts: energy is measured over the same time as busy time."""
    assert errors_in(kind, driver).largest.millijoules <= 0.03


FURTHER_BOUNDS = {
    # By kind of use: GPU-seconds and joules, relative to the device's.
    "shorter than a look": (0.05, 0.35),
    "contexts that draw": (0.006, 0.1),
    "kernels of different draw": (0.006, 0.25),
    "a pod an instance of MIG": (0.006, 0.03),
    "two pods in an instance": (0.3, 0.4),
}


@pytest.mark.parametrize("kind", FURTHER)
def test_the_error_of_use_that_no_driver_can_show_stays_within_its_bound(kind: str) -> None:
    """Which of several processes it was, or whether any process ran at all."""
    largest = errors_of(
        play_cell(kind, {}, sampling_interval_seconds=1.0, seed=3), sampling_interval_seconds=1.0
    ).largest
    busy, joules = FURTHER_BOUNDS[kind]
    assert (largest.busy_ns <= busy, largest.millijoules <= joules) == (True, True)


@pytest.mark.parametrize("processes", ["windows", "mean"])
def test_a_window_that_rounds_to_zero_is_not_mistaken_for_the_latest_one(processes: str) -> None:
    """If idle windows are left out, its sample may be a second old while the rate is zero."""
    tiny, bursts = (0.0, 999.0, 0.0005, 0.0005), (0.0, 999.0, 0.3, 0.6)
    driver = {"ring_idle": "skipped", "processes": processes}
    run = play_lives([tiny, bursts], driver, sampling_interval_seconds=1.0, random=Random(2))  # noqa: S311  # a scenario, no secret
    assert errors_of(run, sampling_interval_seconds=1.0).largest.busy_ns <= 0.002


@pytest.mark.parametrize("processes", ["windows", "mean"])
@pytest.mark.parametrize(
    ("load", "kernel"),
    [
        (0.01, 0.05),
        pytest.param(0.02, 0.04, marks=pytest.mark.extended),
        pytest.param(0.05, 0.05, marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize(
    ("window_seconds", "unknown"), [(1 / 6, 0.1), (0.25, 0.1), (1 / 3, 0.1), (0.5, 0.6), (1.0, 0.7)]
)
def test_a_gap_between_samples_of_rare_use_is_not_mistaken_for_a_window(
    load: float, kernel: float, window_seconds: float, unknown: float, processes: str
) -> None:
    """Several gaps in a row prove nothing: most of them span several windows, or many."""
    lives = [(0.0, 999.0, load, kernel), (0.0, 999.0, load / 2, kernel)]
    driver = {"ring_idle": "skipped", "processes": processes, "window_seconds": window_seconds}
    run = play_lives(lives, driver, sampling_interval_seconds=1.0, random=Random(2))  # noqa: S311  # as above
    errors = errors_of(run, sampling_interval_seconds=1.0)
    assert errors.largest.busy_ns <= 0.01
    assert errors.unknown <= unknown


class StraySampleGpu:
    """A GPU whose answers contain a sample with an impossible timestamp."""

    def __init__(self, gpu: NvidiaGpu, stamp_us: int) -> None:
        self.uuid, self.index = gpu.uuid, gpu.index
        self._gpu = gpu
        self._stray = UtilizationSample(timestamp_us=stamp_us, percent=0)

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        answer = self._gpu.query(group, cursor)
        if group is CallGroup.USAGE:
            answer["samples"] = (*(answer["samples"] or ()), self._stray)
        return answer

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        look = self._gpu.fast_poll(cursor, at=at)
        return replace(look, samples=look.samples and (*look.samples, self._stray))


def watch_strays(node: SimulatedNode, clock: ManualClock, stamp_us: int) -> list[NodeSample]:
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    opened = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    gpus: list[Any] = [StraySampleGpu(gpu, stamp_us) for gpu in opened]
    made = []
    for _ in range(round(RUN_SECONDS)):
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        take_fast_polls(sampler, gpus, clock, node.clock, NS_PER_SECOND)
    return made


@pytest.mark.parametrize("stamp_us", [2**62 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("processes", ["windows", pytest.param("mean", marks=pytest.mark.extended)])
def test_a_sample_with_a_far_future_timestamp_in_each_answer_does_no_harm(
    processes: str, stamp_us: int
) -> None:
    counter = READINGS_DROPPED.labels(reading="utilization_ratio", reason="out_of_range")
    dropped = value_of(counter)
    run = play_lives(
        [(0.0, 999.0, 0.3, 0.05), (0.0, 999.0, 0.2, 0.02)],
        {"processes": processes},
        sampling_interval_seconds=1.0,
        random=Random(2),  # noqa: S311  # as above
        watched_by=lambda node, clock: watch_strays(node, clock, stamp_us),
    )
    errors = errors_of(run, sampling_interval_seconds=1.0)
    assert (errors.largest.busy_ns <= 0.006, errors.unknown) == (True, 0.0)
    assert value_of(counter) - dropped >= RUN_SECONDS - 1


def test_old_usage_does_not_move_the_time_of_ticks() -> None:
    """The driver's ring has only two windows of use, ten minutes apart."""
    lives = [(0.02, 0.15, 1.0, 0.1), (600.02, 600.15, 1.0, 0.1), (625.0, 999.0, 0.4, 0.01)]

    def watch_late(node: SimulatedNode, clock: ManualClock) -> list[NodeSample]:
        clock.advance(610.0)
        return watch(node, clock, sampling_interval_seconds=1.0, seconds=RUN_SECONDS)

    run = play_lives(
        lives,
        {"ring_idle": "skipped"},
        sampling_interval_seconds=1.0,
        random=Random(2),  # noqa: S311  # as above
        watched_by=watch_late,
    )
    assert errors_of(run, sampling_interval_seconds=1.0).largest.busy_ns <= 0.01
