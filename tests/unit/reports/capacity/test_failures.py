"""Failures that are derived from incidents, and the time for which a GPU stays unused after one."""

import pytest

from gpuledger_reports.capacity.failures import (
    DeviceHour,
    SeenIncident,
    find_failures,
    stalled_minutes,
)

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
WHOLE = (1 << 60) - 1
UNTIL_40 = (1 << 40) - 1


def seen(minute: int, kind: str = "xid", xid: int | None = None, gpu: str = "a") -> SeenIncident:
    return SeenIncident(("prod", "n", gpu), minute * MINUTE_US, kind, xid, (f"pod-{minute}",))


def test_incidents_of_a_gpu_are_one_failure_until_an_hour_passes_without_one() -> None:
    found = find_failures(
        [
            seen(0, xid=48),
            seen(1, xid=119, gpu="b"),
            seen(50, xid=154),
            seen(100, xid=95),
            seen(161, "gpu_lost"),
        ]
    )
    assert [(each.gpu[2], each.time_us // MINUTE_US, each.cause) for each in found] == [
        ("a", 0, "ecc"),
        ("b", 1, "xid"),
        ("a", 161, "lost"),
    ]
    assert found[0].pods == {"pod-0", "pod-50", "pod-100"}


@pytest.mark.parametrize(
    ("kind", "xid", "cause"),
    [
        ("xid", 94, "ecc"),
        ("ecc_uncorrected", None, "ecc"),
        ("xid", 79, "lost"),
        ("gpu_lost", None, "lost"),
        ("xid", 119, "xid"),
        ("nvlink_recovery_failed", None, "other"),
    ],
)
def test_each_failure_has_one_cause(kind: str, xid: int | None, cause: str) -> None:
    assert [each.cause for each in find_failures([seen(0, kind, xid)])] == [cause]


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        ({}, 0),
        # Used from the 30th minute on; the failure was in the tenth.
        ({0: DeviceHour(WHOLE, WHOLE - ((1 << 30) - 1))}, 19),
        # Used in the minute of the failure, but not later.
        ({0: DeviceHour(WHOLE, (1 << 11) - 1), 1: DeviceHour(WHOLE, 0)}, 49 + 60),
        # Released after half an hour.
        ({0: DeviceHour(UNTIL_40, 0, WHOLE - UNTIL_40), 1: DeviceHour(WHOLE, 0)}, 29),
        # For part of the last minute, it was already free.
        ({0: DeviceHour(UNTIL_40, 0, WHOLE - UNTIL_40 // 2)}, 29),
        ({0: DeviceHour(WHOLE, 0), 1: DeviceHour(WHOLE, 1)}, 49),
        # Without a response or without samples until the 40th minute, or for the rest of the hour.
        ({0: DeviceHour(WHOLE - UNTIL_40, 0), 1: DeviceHour(WHOLE, 1)}, 20),
        ({0: DeviceHour(UNTIL_40, 0), 1: DeviceHour(WHOLE, 0)}, 29 + 60),
        ({1: DeviceHour(WHOLE, 0)}, 60),
    ],
)
def test_a_gpu_is_stalled_until_it_is_used_or_released(
    hours: dict[int, DeviceHour], expected: int
) -> None:
    assert stalled_minutes(10 * MINUTE_US + 5, 2 * HOUR_US, hours) == expected
