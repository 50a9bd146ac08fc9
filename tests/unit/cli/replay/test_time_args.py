"""Times and durations are read as people write them, or refused with what to write instead."""

import pytest

from gpuledger.errors import UserError
from gpuledger_cli.replay.range_plan import (
    parse_duration,
    parse_moment,
    write_duration,
    write_moment,
)
from tests.errors import has_words

NOW_MS = 1_795_000_000_000


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("now", NOW_MS),
        ("-90s", NOW_MS - 90_000),
        ("-0.5s", NOW_MS - 500),
        ("-1h30m", NOW_MS - 5_400_000),
        ("-1d", NOW_MS - 86_400_000),
        ("2026-11-21T14:00:00Z", 1_795_269_600_000),
        ("2026-11-21T15:00:00+01:00", 1_795_269_600_000),
        ("2026-11-21T14:00:00.25Z", 1_795_269_600_250),
    ],
)
def test_a_moment_is_read(text: str, expected_ms: int) -> None:
    assert parse_moment(text, option="--from", now_ms=NOW_MS) == expected_ms


@pytest.mark.parametrize(
    "text", ["", "yesterday", "-", "-1", "1h", "-1h30", "2026-11-21T14:00:00", "14:00Z"]
)
def test_what_is_no_moment_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(UserError, check=has_words("--from", "-1h30m")):
        parse_moment(text, option="--from", now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("0s", 0), ("5m", 300_000), ("1d1h", 90_000_000)]
)
def test_a_duration_is_read(text: str, expected_ms: int) -> None:
    assert parse_duration(text, option="--lead-in") == expected_ms


@pytest.mark.parametrize("text", ["", "5", "-5m", "5 m", "5w"])
def test_what_is_no_duration_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(UserError, check=has_words("--lead-in", "1h30m")):
        parse_duration(text, option="--lead-in")


@pytest.mark.parametrize("text", ["2026-11-21T14:00:00Z", "2026-11-21T14:00:00.250Z"])
def test_a_moment_is_written_as_it_is_read(text: str) -> None:
    assert write_moment(parse_moment(text, option="", now_ms=0)) == text


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(0, "0s"), (1, "1s"), (40_000, "40s"), (4_325_000, "1h 12m"), (86_400_000, "1d")],
)
def test_a_duration_is_written_in_its_two_largest_units(duration_ms: int, text: str) -> None:
    assert write_duration(duration_ms) == text
