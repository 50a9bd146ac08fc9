"""Parses a bill's period from a command's options or a request's parameters. Pure.

Periods consist of whole hours, so that bills of adjacent periods never share an hour.
"""

from collections.abc import Callable, Mapping
from typing import Final

from gpuledger.errors import ArgumentError
from gpuledger.time_ranges import begin_of_unit, parse_moment, parse_range
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window

MAX_DAYS: Final = 3_660
"""Ten years. Their bill takes minutes; a longer period is surely a mistake."""


def parse_window(text: str, *, option: str, now_us: int, max_days: int = MAX_DAYS) -> Window:
    """Return a time range, widened to whole hours.

    Raises `ArgumentError` if the text is invalid or the range is longer than `max_days`.
    """
    begin_ms, end_ms = parse_range(text, option=option, now_ms=now_us // 1000)
    window = Window(begin_ms * 1000 // HOUR_US * HOUR_US, _hours_up(end_ms * 1000))
    if window.end_us - window.begin_us > max_days * DAY_US:
        raise ArgumentError(option, f"{text!r} is longer than {max_days} days")
    return window


def bill_window(
    given: Mapping[str, str],
    *,
    now_us: int,
    complete_until_us: Callable[[], int] | None = None,
    max_days: int = MAX_DAYS,
) -> Window | None:
    """Return the window given by `period`, or by `from` and `to`; `None` if none is given.

    Without `to`, the window ends at `complete_until_us`, rounded up to an hour. Raises
    `ArgumentError` if the parameters are invalid.
    """
    if "period" in given:
        if "from" in given or "to" in given:
            raise ArgumentError("period", "conflicts with from and to; give either, not both")
        return parse_window(given["period"], option="period", now_us=now_us, max_days=max_days)
    if "from" not in given:
        if "to" in given:
            raise ArgumentError("from", "is missing; give it with `to`")
        return None
    begin_us = _whole_hour(given["from"], "from", now_us)
    if "to" in given:
        end_us = _whole_hour(given["to"], "to", now_us)
    elif complete_until_us is None:
        raise ArgumentError("to", "is missing; give it with `from`")
    else:
        end_us = max(begin_us + HOUR_US, _hours_up(complete_until_us()))
    if begin_us >= end_us:
        raise ArgumentError("to", "must be later than `from`")
    if end_us - begin_us > max_days * DAY_US:
        raise ArgumentError("from", f"is more than {max_days} days before `to`")
    return Window(begin_us, end_us)


def month_of(time_us: int) -> Window:
    """Return the UTC month that contains a time.

    The first instant of a month counts as the end of the month before it.
    """
    time_ms = (time_us - 1) // 1000
    begin_ms, end_ms = (begin_of_unit("month", time_ms, ahead=ahead) for ahead in (0, 1))
    return Window(begin_ms * 1000, end_ms * 1000)


def _whole_hour(text: str, option: str, now_us: int) -> int:
    """Return a time, which must be a whole hour; `now` means the end of the current hour."""
    time_us = parse_moment(text, option=option, now_ms=_hours_up(now_us) // 1000) * 1000
    if time_us % HOUR_US:
        raise ArgumentError(
            option, f"{text!r} is not a whole hour; give one such as 2026-10-01T14:00:00Z or -2h"
        )
    return time_us


def _hours_up(time_us: int) -> int:
    return -(-time_us // HOUR_US) * HOUR_US
