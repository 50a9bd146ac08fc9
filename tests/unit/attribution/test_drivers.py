"""A pod's GPU-seconds are right on every form of driver whose answers allow it."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.truth_runs import (
    CLASSES,
    DRIVERS,
    FURTHER,
    MODELLED,
    UNMEASURED,
    errors_of,
    play_cell,
    play_lives,
)

SHARED = [kind for kind in CLASSES if not kind.startswith("one pod")]
MEASURED = [name for name in DRIVERS if name not in UNMEASURED | MODELLED]

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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(drivers, st.sampled_from(sorted(CLASSES)), st.sampled_from([1.0, 5.0, 10.0]), st.integers())
def test_whatever_a_driver_answers_a_pod_is_booked_what_it_used_to_one_percent(
    driver: Mapping[str, Any], kind: str, tick_seconds: float, seed: int
) -> None:
    """Over each 60 seconds, of the device's time; nobody tells the agent which driver it is."""
    errors = errors_of(
        play_cell(kind, driver, tick_seconds=tick_seconds, seed=seed), tick_seconds=tick_seconds
    )
    assert errors.largest.busy_ns <= 0.01


@pytest.mark.parametrize("driver", MEASURED)
@pytest.mark.parametrize("kind", CLASSES)
def test_with_ticks_of_a_second_hardly_any_time_is_unknown(driver: str, kind: str) -> None:
    errors = errors_of(play_cell(kind, DRIVERS[driver], tick_seconds=1.0, seed=3), tick_seconds=1.0)
    assert errors.largest.busy_ns <= 0.006
    assert errors.unknown <= 0.02


@pytest.mark.parametrize("driver", sorted(MODELLED))
@pytest.mark.parametrize("kind", SHARED)
def test_samples_that_come_to_more_than_the_device_are_made_shares(driver: str, kind: str) -> None:
    errors = errors_of(play_cell(kind, DRIVERS[driver], tick_seconds=1.0, seed=3), tick_seconds=1.0)
    assert errors.largest.busy_ns <= 0.015


@pytest.mark.parametrize("driver", sorted(UNMEASURED))
def test_without_samples_of_processes_a_pod_alone_has_all_that_ran(driver: str) -> None:
    run = play_cell("one pod, bursts", DRIVERS[driver], tick_seconds=1.0, seed=3)
    assert errors_of(run, tick_seconds=1.0).largest.busy_ns <= 0.006


@pytest.mark.parametrize("driver", ["each window", "mean since the question", "windows of 1 s"])
@pytest.mark.parametrize("kind", CLASSES)
def test_joules_of_kernels_that_draw_alike_are_right_to_three_percent(
    driver: str, kind: str
) -> None:
    """Also on bursts: energy is of the time that the busy time covers."""
    errors = errors_of(play_cell(kind, DRIVERS[driver], tick_seconds=1.0, seed=4), tick_seconds=1.0)
    assert errors.largest.millijoules <= 0.03


FURTHER_BOUNDS = {
    # Kinds of use: GPU-seconds and joules, as parts of the device's.
    "shorter than a look": (0.05, 0.35),
    "contexts that draw": (0.006, 0.1),
    "kernels of different draw": (0.006, 0.25),
    "a pod an instance of MIG": (0.006, 0.03),
    "two pods in an instance": (0.3, 0.4),
}


@pytest.mark.parametrize("kind", FURTHER)
def test_what_no_form_of_driver_decides_stays_within_its_bound(kind: str) -> None:
    """Who of several it was that nobody can see, or that it was anybody at all."""
    largest = errors_of(play_cell(kind, {}, tick_seconds=1.0, seed=3), tick_seconds=1.0).largest
    busy, joules = FURTHER_BOUNDS[kind]
    assert (largest.busy_ns <= busy, largest.millijoules <= joules) == (True, True)


@pytest.mark.parametrize("processes", ["windows", "mean"])
def test_a_window_that_rounds_to_nothing_is_not_taken_for_the_latest_one(processes: str) -> None:
    """Where idle windows are left out, its sample may be a second old beside a rate of nothing."""
    tiny, bursts = (0.0, 999.0, 0.0005, 0.0005), (0.0, 999.0, 0.3, 0.6)
    driver = {"ring_idle": "skipped", "processes": processes}
    run = play_lives([tiny, bursts], driver, tick_seconds=1.0, random=Random(2))  # noqa: S311  # a scenario, no secret
    assert errors_of(run, tick_seconds=1.0).largest.busy_ns <= 0.002
