"""reference/limits.md has the constants' values, with their units."""

import pytest

from gpuledger.records import bounds
from tests.docs_gen.limits_page import SECTIONS, show_value

LIMITS = [limit for section in SECTIONS for limit in section.limits]
DERIVED = {
    # other units of listed bounds
    "MAX_MILLIWATTS",
    "MAX_MILLIJOULES",
    "MAX_INTERVAL_NS",
    "MAX_BOOTTIME_NS",
    "MAX_TICK_MILLIJOULES",
    "MAX_SECONDS",
    "MAX_DURATION_NS",
    # of kinds and counters that NVML enumerates
    "MAX_MARGIN_CELSIUS",
    "MAX_PERFORMANCE_STATE",
    "MAX_ENDED_KINDS",
    "MAX_FEC_ERRORS",
    "MAX_SEQ",
    # of bytes that no message has room for
    "MAX_BASE64_LENGTH",
}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("MAX_BYTES", 64 * 1024, "64 KiB"),
        ("MAX_MESSAGE_BYTES", 999_872, "999,872 bytes"),
        ("MAX_MEMORY_BYTES", 2**48, "256 TiB"),
        ("MAX_AHEAD_NS", 2 * 86_400 * 10**9, "48 h"),
        ("UNRESPONSIVE_NS", 120 * 10**9, "2 min"),
        ("IDLE_SECONDS", 75, "75 s"),
        ("MAX_ID_LENGTH", 256, "256 characters"),
        ("MAX_PROCESSES", 16_384, "16,384"),
    ],
)
def test_a_value_is_shown_with_the_unit_of_its_name(name: str, value: int, shown: str) -> None:
    assert show_value(name, value) == shown


def test_every_limit_is_listed_once_and_is_a_number() -> None:
    listed = [(limit.module.__name__, limit.name) for limit in LIMITS]

    assert len(set(listed)) == len(listed)
    assert len({limit.item for limit in LIMITS}) == len(LIMITS)
    for limit in LIMITS:
        assert isinstance(getattr(limit.module, limit.name), int | float), limit


def test_every_bound_of_records_is_listed() -> None:
    listed = {limit.name for limit in LIMITS if limit.module is bounds}
    known = {name for name in vars(bounds) if name.startswith(("MAX_", "MIN_"))}

    assert known - listed == DERIVED
