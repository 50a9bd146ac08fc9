"""After events that leave the driver's answers incomplete, no use is wrongly called measured."""

from random import Random
from typing import Final, NamedTuple

import pytest

from tests.truth_runs import CLAIMS, EVENTS, at_steps, errors_of, play_cell, play_use

CLAIMED_BOUND: Final = 0.01
INTERVALS: Final = (1.0, 5.0, 10.0)


class Outcome(NamedTuple):
    """The methods of the ticks that an event affects, and the error that they admit."""

    methods: frozenset[str]
    bound: float


OUTCOMES: Final = {
    "clock set forward": Outcome(frozenset({"sampled"}), 0.05),
    "clock set back": Outcome(frozenset({"sampled", "memory_share"}), 0.1),
    "a pid comes again": Outcome(frozenset({"partial_samples"}), 0.1),
    "a pid comes again and ends": Outcome(frozenset({"partial_samples"}), 0.1),
    "MIG reconfigured": Outcome(frozenset(), 0.01),
    "MPS server among its clients": Outcome(frozenset({"mps_server"}), 0.25),
    "pods take turns": Outcome(frozenset({"partial_samples"}), 0.01),
    "kernels that fill a fifth": Outcome(frozenset({"partial_samples"}), 0.3),
    "calls of 300 ms": Outcome(frozenset({"partial_samples"}), 0.05),
    "newest window, calls of 300 ms": Outcome(frozenset({"partial_samples"}), 0.05),
}


STEPS_SECONDS: Final = (-3600.0, -8.0, -3.0, -0.4, -0.06, 0.06, 0.4, 3.0, 3600.0)


@pytest.mark.parametrize("processes", ["windows", "mean"])
@pytest.mark.parametrize("by_seconds", STEPS_SECONDS)
def test_no_step_of_the_clock_affects_use_that_is_reported_as_measured(
    by_seconds: float, processes: str
) -> None:
    """Neither in the ticks around the step nor later."""
    use = at_steps(Random(2), by_seconds)  # noqa: S311  # a scenario, no secret
    played = play_use(
        use,
        {"processes": processes},
        sampling_interval_seconds=5.0,
        random=Random(2),  # noqa: S311  # as above
    )
    assert errors_of(played, sampling_interval_seconds=5.0).claimed <= CLAIMED_BOUND
    assert played.methods()[-1] <= CLAIMS or by_seconds < -100


def test_each_event_has_an_outcome() -> None:
    assert OUTCOMES.keys() == EVENTS.keys()


@pytest.mark.parametrize("sampling_interval_seconds", INTERVALS)
@pytest.mark.parametrize("event", EVENTS)
def test_use_that_an_event_leaves_unknown_is_not_reported_as_measured(
    event: str, sampling_interval_seconds: float
) -> None:
    played = play_cell(event, {}, sampling_interval_seconds=sampling_interval_seconds, seed=1)
    errors = errors_of(played, sampling_interval_seconds=sampling_interval_seconds)
    methods, bound = OUTCOMES[event]
    assert errors.claimed <= CLAIMED_BOUND
    assert errors.largest.busy_ns <= bound
    estimates = {str(one) for found in played.methods() for one in found - CLAIMS - {None}}
    assert estimates <= methods


@pytest.mark.parametrize("seed", [1, 2])
def test_each_process_of_a_reused_pid_gets_its_own_use_also_if_samples_come_later(
    seed: int,
) -> None:
    """With windows of a second, a tick covers time in which another process had the pid."""
    played = play_cell(
        "a pid comes again", {"window_seconds": 1.0}, sampling_interval_seconds=1.0, seed=seed
    )
    errors = errors_of(played, sampling_interval_seconds=1.0)
    assert errors.claimed <= 0.005
    assert errors.largest.busy_ns <= 0.005


@pytest.mark.parametrize("sampling_interval_seconds", [1.0, 10.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_use_of_a_reused_pid_is_not_reported_as_measured_if_both_processes_have_ended(
    seed: int, sampling_interval_seconds: float
) -> None:
    """The second process also ends before the next tick lists it."""
    played = play_cell(
        "a pid comes again and ends",
        {"window_seconds": 1.0},
        sampling_interval_seconds=sampling_interval_seconds,
        seed=seed,
    )
    errors = errors_of(played, sampling_interval_seconds=sampling_interval_seconds)
    assert errors.claimed <= 0.005
    assert errors.largest.busy_ns <= OUTCOMES["a pid comes again"].bound
    assert "partial_samples" in errors.methods
