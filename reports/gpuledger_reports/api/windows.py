"""The times that an allocation is asked for, as clients of OpenCost write them. Pure; in UTC.

Bills are of whole hours: what begins or ends within one is widened to it. Weeks begin on Sunday, as
OpenCost's do.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from gpuledger_reports.api.parameters import LATEST_SECONDS, ParameterError, moment_us, shown
from gpuledger_reports.times import DAY_US, HOUR_US, Window

Accumulate = Literal["", "all", "hour", "day", "week", "month"]
MAX_DAYS: Final = 400
MAX_SETS: Final = 400
"""How many sets one answer may have: each is a bill."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DURATION: Final = re.compile(r"(?P<count>\d{1,6})(?P<unit>[mhdw])", re.ASCII)
_UNITS_US: Final = {"m": 60_000_000, "h": HOUR_US, "d": DAY_US, "w": 7 * DAY_US}
_ACCUMULATE: Final[dict[str, Accumulate]] = {
    **dict.fromkeys(("", "false", "False", "0", "none"), ""),
    **dict.fromkeys(("true", "True", "1", "all"), "all"),
    "hour": "hour",
    "day": "day",
    "week": "week",
    "month": "month",
}
_FORMS: Final = (
    "today, yesterday, week, month, lastweek, lastmonth, a duration such as 7d, or two times"
    " such as 2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"
)


def parse_window(text: str, *, now_us: int, name: str = "window") -> Window:
    """Return the time that a text means, widened to whole hours; raises `ParameterError`."""
    begin_us, end_us = _named(text, now_us) or _lasting(text, now_us) or _pair(text, name)
    if begin_us >= end_us:
        raise ParameterError(name, f"{shown(text)} ends before it has begun")
    window = Window(begin_us // HOUR_US * HOUR_US, -(-end_us // HOUR_US) * HOUR_US)
    if window.begin_us < 0 or window.end_us > LATEST_SECONDS * 10**6:
        raise ParameterError(name, f"{shown(text)} is not between the years 1970 and 2200")
    if window.end_us - window.begin_us > MAX_DAYS * DAY_US:
        raise ParameterError(name, f"{shown(text)} is longer than {MAX_DAYS} days")
    return window


def parse_accumulate(text: str) -> Accumulate:
    """Return what sets are summed up to; raises `ParameterError`."""
    try:
        return _ACCUMULATE[text]
    except KeyError as error:
        raise ParameterError(
            "accumulate", f"{shown(text)} is none of true, false, hour, day, week, month"
        ) from error


def sets_of(window: Window, *, step: str | None, accumulate: Accumulate) -> tuple[Window, ...]:
    """Return the windows of the sets that are asked for, in order; raises `ParameterError`.

    `accumulate` counts before `step`. Sets of days, weeks and months begin and end where those do.
    """
    if accumulate == "all" or (not accumulate and not step):
        return (window,)
    if accumulate:
        following, name = _FOLLOWING[accumulate], "accumulate"
    else:
        step_us, name = _step_us(step or ""), "step"

        def following(time_us: int) -> int:
            return time_us + step_us

    found: list[Window] = []
    begin_us = window.begin_us
    while begin_us < window.end_us:
        if len(found) == MAX_SETS:
            raise ParameterError(name, f"more than {MAX_SETS} sets; ask for longer or fewer ones")
        end_us = min(following(begin_us), window.end_us)
        found.append(Window(begin_us, end_us))
        begin_us = end_us
    return tuple(found)


def _named(text: str, now_us: int) -> tuple[int, int] | None:
    today = _EPOCH + timedelta(days=now_us // DAY_US)
    sunday = today - timedelta(days=today.isoweekday() % 7)
    month = today.replace(day=1)
    before = (month - timedelta(days=1)).replace(day=1)
    day, week = timedelta(days=1), timedelta(days=7)
    named = {
        "today": (today, today + day),
        "yesterday": (today - day, today),
        "week": (sunday, None),
        "lastweek": (sunday - week, sunday),
        "month": (month, None),
        "lastmonth": (before, month),
    }
    if text not in named:
        return None
    begin, end = named[text]
    # A minute at least: at a month's very begin nothing of it has passed yet.
    return _us(begin), now_us + _UNITS_US["m"] if end is None else _us(end)


def _lasting(text: str, now_us: int) -> tuple[int, int] | None:
    """Return the time that a duration means: up to the end of the unit in which it is now."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    unit_us = _UNITS_US[match["unit"]]
    # Weeks end with today, not with the week.
    whole_us = min(unit_us, DAY_US)
    end_us = (now_us // whole_us + 1) * whole_us
    return end_us - int(match["count"]) * unit_us, end_us


def _pair(text: str, name: str) -> tuple[int, int]:
    begin, comma, end = text.partition("," if "," in text or "T" in text else "-")
    if not comma:
        raise ParameterError(name, f"{shown(text)} is no window; give {_FORMS}")
    return moment_us(begin, name), moment_us(end, name)


def _step_us(text: str) -> int:
    match = _DURATION.fullmatch(text)
    step_us = int(match["count"]) * _UNITS_US[match["unit"]] if match else 0
    if step_us <= 0 or step_us % HOUR_US:
        raise ParameterError("step", f"{shown(text)} is no number of whole hours; give 1h, 1d, 1w")
    return step_us


def _us(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _next_day(time_us: int) -> int:
    return (time_us // DAY_US + 1) * DAY_US


def _next_week(time_us: int) -> int:
    day = _EPOCH + timedelta(days=time_us // DAY_US)
    return _us(day + timedelta(days=7 - day.isoweekday() % 7))


def _next_month(time_us: int) -> int:
    day = _EPOCH + timedelta(days=time_us // DAY_US)
    return _us(day.replace(year=day.year + day.month // 12, month=day.month % 12 + 1, day=1))


_FOLLOWING: Final[dict[str, Callable[[int], int]]] = {
    "hour": lambda time_us: (time_us // HOUR_US + 1) * HOUR_US,
    "day": _next_day,
    "week": _next_week,
    "month": _next_month,
}
