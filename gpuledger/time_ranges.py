"""Parses times, durations and time ranges; one grammar for all commands and HTTP parameters.

| text                                        | a time                                  |
|---------------------------------------------|-----------------------------------------|
| `2026-10-01T14:00:00Z`, with any offset     | as written                              |
| `2026-10-01`                                | the start of that day                   |
| `1791554400`                                | seconds since 1970                      |
| `-90s`, `-1h30m`, `-7d`                     | that long before now                    |
| `now`                                       | now                                     |

| text                                        | a range                                 |
|---------------------------------------------|-----------------------------------------|
| `2026-10`, `2026-10-05`, `2026`             | that month, day or year                 |
| `today`, `yesterday`, `lastweek`, `lastmonth` | as named; weeks begin on Sunday       |
| `week`, `month`                             | from its start until now                |
| `3h`, `7d`, `2w`                            | that long, to the end of this hour or day |
| `TIME,TIME`, `SECONDS-SECONDS`              | from one to the other, exclusive        |

A duration is one or more numbers with a unit each: `s`, `m`, `h`, `d` or `w`.

The forms of ranges are OpenCost's, plus calendar ranges. Everything is in UTC. `option` is the name
of the option or parameter in errors.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from gpuledger.errors import ArgumentError
from gpuledger.texts import shorten_middle

Unit = Literal["hour", "day", "week", "month", "quarter", "year"]
LATEST_MS: Final = 7_258_118_400_000
"""The latest time that is accepted: the start of the year 2200."""
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_UNITS_MS: Final = {"w": 7 * _DAY_MS, "d": _DAY_MS, "h": _HOUR_MS, "m": 60_000, "s": 1000}
_MONTHS: Final[dict[Unit, int]] = {"month": 1, "quarter": 3, "year": 12}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_DURATION: Final = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?[smhdw])+", re.ASCII)
_PART: Final = re.compile(r"([\d.]+)([smhdw])", re.ASCII)
_SECONDS: Final = re.compile(r"\d{9,11}", re.ASCII)
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_DATE: Final = re.compile(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?", re.ASCII)
_PAIR: Final = re.compile(r"([^,]+),([^,]+)|(\d{9,11})-(\d{9,11})", re.ASCII)
TIME_FORMS: Final = "2026-11-21T14:00:00Z, 2026-11-21 (start of that day, UTC), -12h (ago) or now"
RANGE_FORMS: Final = (
    "2026-11, 2026-11-21, 2026, today, yesterday, week, lastweek, month, lastmonth, 7d (until now)"
    " or two times separated by a comma"
)
DURATION_FORMS: Final = "90s, 15m, 1h30m, 7d or 2w"
"""The forms in help and errors."""
_SHOWN: Final = 60


class WholeUnit(NamedTuple):
    """A unit in which an option takes whole numbers."""

    name: str
    """Its name in the plural."""
    ms: int
    """Its length in milliseconds."""
    forms: str
    """Examples for help and errors."""


HOURS: Final = WholeUnit("hours", 3_600_000, "36h, 7d or 2w")
DAYS: Final = WholeUnit("days", 24 * HOURS.ms, "7d or 2w")


def parse_moment(text: str, *, option: str, now_ms: int) -> int:
    """Return a time in milliseconds since the epoch; raise `ArgumentError` if it is invalid."""
    if text == "now":
        return now_ms
    if text.startswith("-") and _DURATION.fullmatch(text[1:]):
        return _in_bounds(now_ms - _duration_ms(text[1:]), text, option)
    if _SECONDS.fullmatch(text):
        return _in_bounds(int(text) * 1000, text, option)
    if _DAY.fullmatch(text) and (day := _calendar(text)):
        return _in_bounds(day[0], text, option)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        hint = ": no time zone; append Z for UTC" if found else ""
        raise _invalid("time", text, TIME_FORMS, option, hint=hint)
    return _in_bounds(round((found - _EPOCH) / _MS), text, option)


def parse_range(text: str, *, option: str, now_ms: int) -> tuple[int, int]:
    """Return the start and the end (exclusive) of a range, in milliseconds since the epoch.

    Raises `ArgumentError` if the range is invalid.
    """
    begin_ms, end_ms = (
        _named(text, now_ms)
        or _calendar(text)
        or _lasting(text, now_ms)
        or _pair(text, option, now_ms)
    )
    if begin_ms >= end_ms:
        raise ArgumentError(option, f"invalid range {_shown(text)}: it ends before it begins")
    return _in_bounds(begin_ms, text, option), _in_bounds(end_ms, text, option)


def is_duration(text: str) -> bool:
    """Return whether a text has the form of a duration."""
    return _DURATION.fullmatch(text) is not None


def parse_duration(text: str, *, option: str, forms: str = DURATION_FORMS) -> int:
    """Return a duration in milliseconds; raise `ArgumentError`, which names `forms`, if invalid."""
    if not _DURATION.fullmatch(text):
        raise _invalid("duration", text, forms, option)
    return _duration_ms(text)


def parse_whole(text: str, *, option: str, unit: WholeUnit, minimum: int = 0) -> int:
    """Return a duration in whole units; raises `ArgumentError` if it is invalid."""
    count, rest = divmod(parse_duration(text, option=option, forms=unit.forms), unit.ms)
    if rest or count < minimum:
        bound = f", at least {minimum}" if minimum else ""
        raise ArgumentError(
            option, f"invalid duration {text!r}; it must be whole {unit.name}{bound}"
        )
    return count


def begin_of_unit(unit: Unit, time_ms: int, *, ahead: int = 0) -> int:
    """Return the start of the unit that contains `time_ms`, moved by `ahead` units.

    Times are in milliseconds since the epoch; a negative `ahead` moves back.
    """
    day = _EPOCH + timedelta(days=time_ms // _DAY_MS)
    if unit == "hour":
        return (time_ms // _HOUR_MS + ahead) * _HOUR_MS
    if unit in ("day", "week"):
        back = day.isoweekday() % 7 if unit == "week" else 0
        days = ahead * (7 if unit == "week" else 1) - back
        return (time_ms // _DAY_MS + days) * _DAY_MS
    length = _MONTHS[unit]
    months = ((12 * day.year + day.month - 1) // length + ahead) * length
    begin = datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)
    return round((begin - _EPOCH) / _MS)


def write_moment(time_ms: int) -> str:
    """Return a UTC time as text that `parse_moment` accepts; omit milliseconds if they are 0."""
    moment = datetime.fromtimestamp(time_ms / 1000, tz=UTC)
    precision = "milliseconds" if time_ms % 1000 else "seconds"
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def write_duration(duration_ms: int) -> str:
    """Return a duration in at most two units, such as `1d 2h` or `40s`, rounded up to seconds."""
    left, parts = -(-duration_ms // 1000), []
    for unit in "dhms":
        count, left = divmod(left, _UNITS_MS[unit] // 1000)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def _named(text: str, now_ms: int) -> tuple[int, int] | None:
    # A minute from now, so that the range is not empty at the very start of a week or month.
    until_ms = now_ms + _UNITS_MS["m"]
    match text:
        case "today":
            return begin_of_unit("day", now_ms), begin_of_unit("day", now_ms, ahead=1)
        case "yesterday":
            return begin_of_unit("day", now_ms, ahead=-1), begin_of_unit("day", now_ms)
        case "week" | "month":
            return begin_of_unit(text, now_ms), until_ms
        case "lastweek":
            return begin_of_unit("week", now_ms, ahead=-1), begin_of_unit("week", now_ms)
        case "lastmonth":
            return begin_of_unit("month", now_ms, ahead=-1), begin_of_unit("month", now_ms)
        case _:
            return None


def _calendar(text: str) -> tuple[int, int] | None:
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day = (int(part or 1) for part in match.groups())
    unit: Unit = "day" if match[3] else "month" if match[2] else "year"
    try:
        begin_ms = round((datetime(year, month, day, tzinfo=UTC) - _EPOCH) / _MS)
        return begin_ms, begin_of_unit(unit, begin_ms, ahead=1)
    except ValueError:  # no such date, or its end is in the year 10000
        return None


def _lasting(text: str, now_ms: int) -> tuple[int, int] | None:
    if not _DURATION.fullmatch(text):
        return None
    # A range ends with the current minute, hour or day; a range in weeks also ends with today.
    whole_ms = min(_UNITS_MS[text[-1]], _DAY_MS)
    end_ms = (now_ms // whole_ms + 1) * whole_ms
    return end_ms - _duration_ms(text), end_ms


def _pair(text: str, option: str, now_ms: int) -> tuple[int, int]:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise _invalid("range", text, RANGE_FORMS, option)
    begin, end = (match[1], match[2]) if match[1] else (match[3], match[4])
    times = (parse_moment(time, option=option, now_ms=now_ms) for time in (begin, end))
    return next(times), next(times)


def _duration_ms(text: str) -> int:
    return round(sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)))


def _invalid(kind: str, text: str, forms: str, option: str, *, hint: str = "") -> ArgumentError:
    return ArgumentError(option, f"invalid {kind} {_shown(text)}{hint}; write {forms}")


def _in_bounds(time_ms: int, text: str, option: str) -> int:
    if not 0 <= time_ms <= LATEST_MS:
        raise ArgumentError(option, f"{_shown(text)} is not between the years 1970 and 2200")
    return time_ms


def _shown(text: str) -> str:
    return shorten_middle(repr(text), _SHOWN)
