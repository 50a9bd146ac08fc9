"""Times, durations and ranges: what each text means, and which texts are invalid."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from gpuledger.errors import ArgumentError
from gpuledger.time_ranges import (
    parse_duration,
    parse_moment,
    parse_range,
    write_duration,
    write_moment,
)
from tests.errors import has_words

NOW_MS = 1_795_000_000_000


def ms(text: str) -> int:
    """Return a time in October 2026, such as `07 13:45`, or in the month given before it."""
    whole = f"2026-10-{text}" if text[2:3] != "-" else f"2026-{text}"
    form = "%Y-%m-%d %H:%M" if ":" in whole else "%Y-%m-%d"
    return int(datetime.strptime(whole, form).replace(tzinfo=UTC).timestamp()) * 1000


WEDNESDAY_MS = ms("07 13:45")


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("now", NOW_MS),
        ("-90s", NOW_MS - 90_000),
        ("-0.5s", NOW_MS - 500),
        ("-1h30m", NOW_MS - 5_400_000),
        ("-1d", NOW_MS - 86_400_000),
        ("1795269600", 1_795_269_600_000),
        ("2026-11-21T14:00:00Z", 1_795_269_600_000),
        ("2026-11-21", 1_795_219_200_000),
        ("2026-11-21T15:00:00+01:00", 1_795_269_600_000),
        ("2026-11-21T14:00:00.25Z", 1_795_269_600_250),
    ],
)
def test_a_time_is_read(text: str, expected_ms: int) -> None:
    assert parse_moment(text, option="--from", now_ms=NOW_MS) == expected_ms


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("today", "07", "08"),
        ("yesterday", "06", "07"),
        ("week", "04", "07 13:46"),
        ("lastweek", "09-27", "04"),
        ("month", "01", "07 13:46"),
        ("lastmonth", "09-01", "01"),
        ("3h", "07 11:00", "07 14:00"),
        ("30m", "07 13:16", "07 13:46"),
        ("1d", "07", "08"),
        ("7d", "01", "08"),
        ("1w", "01", "08"),
        ("2026-10", "01", "11-01"),
        ("2026-10-07", "07", "08"),
        ("2026-10-01T00:00:00Z,2026-10-02T00:00:00Z", "01", "02"),
        ("2026-10-01T00:20:00+00:00,2026-10-01T02:00:00Z", "01 00:20", "01 02:00"),
        (f"{ms('01') // 1000},{ms('03') // 1000}", "01", "03"),
        (f"{ms('01') // 1000}-{ms('03') // 1000}", "01", "03"),
        ("-2d,now", "05 13:45", "07 13:45"),
        ("2026-10-01,2026-10-03", "01", "03"),
    ],
)
def test_a_range_is_read(text: str, begin: str, end: str) -> None:
    assert parse_range(text, option="window", now_ms=WEDNESDAY_MS) == (ms(begin), ms(end))


@pytest.mark.parametrize(
    ("now", "month"),
    [
        ("2026-11-03T06:30:00Z", "2026-10"),
        ("2026-11-01T00:00:00Z", "2026-10"),
        ("2026-10-31T23:59:59Z", "2026-09"),
        ("2027-01-15T00:00:00Z", "2026-12"),
    ],
)
def test_last_month_is_the_whole_month_before_this_one(now: str, month: str) -> None:
    now_ms = parse_moment(now, option="now", now_ms=0)
    expected = parse_range(month, option="period", now_ms=0)
    assert parse_range("lastmonth", option="period", now_ms=now_ms) == expected


def test_a_year_is_a_range() -> None:
    begin_ms, end_ms = parse_range("2026", option="period", now_ms=0)
    assert (write_moment(begin_ms), write_moment(end_ms)) == (
        "2026-01-01T00:00:00Z",
        "2027-01-01T00:00:00Z",
    )


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("0s", 0), ("5m", 300_000), ("1d1h", 90_000_000), ("1w", 604_800_000)]
)
def test_a_duration_is_read(text: str, expected_ms: int) -> None:
    assert parse_duration(text, option="--lead-in") == expected_ms


def _moment(text: str) -> object:
    return parse_moment(text, option="--at", now_ms=NOW_MS)


def _range(text: str) -> object:
    return parse_range(text, option="--at", now_ms=WEDNESDAY_MS)


def _duration(text: str) -> object:
    return parse_duration(text, option="--at")


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        *(
            (_moment, text, "-12h")
            for text in ("", "yesterday", "-", "-1", "1h", "-1h30", "14Z", "2026-02-30")
        ),
        (_moment, "2026-11-21T14:00:00", "Z for UTC"),
        (_moment, "0001-01-01T00:00:00Z", "1970"),
        (_moment, "-999999w", "1970"),
        *((_range, text, "lastmonth") for text in ("", "7", "d", "-7d", "7x", "tomorrow", "٣d")),
        *((_range, text, "lastmonth") for text in ("2026-13", "2026-02-30", "\u0662026-10")),
        *((_range, text, "lastmonth") for text in ("0000", "9999", "9999-12")),
        *((_range, text, "invalid time") for text in ("7d,8d", "2026-10,2026-11")),
        (_range, "0d", "ends before"),
        (_range, "999999w", "1970"),
        (_range, "2026-10-02T00:00:00Z,2026-10-01T00:00:00Z", "ends before"),
        (_range, "2026-10-01T00:00:00Z,2026-10-01T00:00:00Z", "ends before"),
        (_range, "999999999,99999999999", "1970"),
        *((_duration, text, "1h30m") for text in ("", "5", "-5m", "5 m", "5y")),
    ],
)
def test_an_invalid_text_is_refused_with_the_name_of_the_option(
    parse: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(ArgumentError, check=has_words("--at: ", message)):
        parse(text)


@pytest.mark.parametrize("text", ["2026-11-21T14:00:00Z", "2026-11-21T14:00:00.250Z"])
def test_a_time_is_written_as_it_is_read(text: str) -> None:
    assert write_moment(parse_moment(text, option="", now_ms=0)) == text


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [(0, "0s"), (1, "1s"), (40_000, "40s"), (4_325_000, "1h 12m"), (86_400_000, "1d")],
)
def test_a_duration_is_written_in_its_two_largest_units(duration_ms: int, text: str) -> None:
    assert write_duration(duration_ms) == text
