"""What is said at the end."""

import pytest

from cli.demo.summary import pod_lines, truth_error_ratio
from cli.demo.tally import PodTotal


def totals(**gpu_seconds: float) -> dict[str, PodTotal]:
    """Give totals by UID."""
    return {uid: PodTotal(uid=uid, gpu_seconds=used) for uid, used in gpu_seconds.items()}


@pytest.mark.parametrize(
    ("booked", "truth", "expected"),
    [
        ({"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 1.0}, 0.0),
        ({"a": 10.0}, {"a": 9.0, "b": 1.0}, 0.2),
        ({"a": 1.0}, {}, 0.0),
        ({}, {"a": 2.0}, 1.0),
    ],
)
def test_the_error_is_what_was_booked_wrongly_over_what_was_used(
    booked: dict[str, float], truth: dict[str, float], expected: float
) -> None:
    """Too much on one pod and too little on another both count."""
    assert truth_error_ratio(totals(**booked), truth) == pytest.approx(expected)


def test_a_pod_that_used_a_gpu_and_was_not_booked_has_a_line() -> None:
    """Its booked GPU time is zero, and its true one is not."""
    lines = pod_lines(totals(a=1.0), {"a": 1.0, "b": 2.0})
    assert [(line.uid, line.gpu_seconds, line.true_gpu_seconds) for line in lines] == [
        ("a", 1.0, 1.0),
        ("b", 0.0, 2.0),
    ]


def test_without_a_scenario_there_is_no_truth() -> None:
    """Absent is not zero."""
    assert pod_lines(totals(a=1.0), None)[0].true_gpu_seconds is None
