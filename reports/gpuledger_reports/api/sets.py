"""Divides the window of an allocation request into steps, such as days. Pure; in UTC.

OpenCost answers with one set of allocations for each step.
"""

from typing import Final, Literal

from gpuledger.errors import ArgumentError
from gpuledger.time_ranges import begin_of_unit, parse_duration
from gpuledger_reports.api.parameters import shown
from gpuledger_reports.reading.times import HOUR_US, Window

Accumulate = Literal["", "all", "hour", "day", "week", "month", "quarter"]
MAX_SETS: Final = 400
"""Maximum number of sets of allocations in an answer. Each set needs its own bill."""
_ACCUMULATE: Final[dict[str, Accumulate]] = {
    **dict.fromkeys(("", "false", "False", "0", "none"), ""),
    **dict.fromkeys(("true", "True", "1", "all"), "all"),
    "hour": "hour",
    "day": "day",
    **dict.fromkeys(("week", "weeknow"), "week"),
    "month": "month",
    "quarter": "quarter",
}


def parse_accumulate(text: str) -> Accumulate:
    """Return the period of each set, or `all` for one set; empty if sets are not accumulated.

    Raises `ArgumentError` if the parameter `accumulate` is invalid.
    """
    try:
        return _ACCUMULATE[text]
    except KeyError as error:
        raise ArgumentError(
            "accumulate",
            f"invalid value {shown(text)}; use true, false, hour, day, week, month or quarter",
        ) from error


def sets_of(window: Window, *, step: str | None, accumulate: Accumulate) -> tuple[Window, ...]:
    """Return the window of each requested set of allocations, in order.

    `accumulate` overrides `step`. With neither of them, the whole window is one set. With
    `accumulate`, sets are hours, days, weeks, months or quarters of the calendar. Raises
    `ArgumentError` if `step` is invalid or if there are more than `MAX_SETS` sets.
    """
    if accumulate == "all" or (not accumulate and not step):
        return (window,)
    step_us = 0 if accumulate else _step_us(step or "")
    found: list[Window] = []
    begin_us = window.begin_us
    while begin_us < window.end_us:
        if len(found) == MAX_SETS:
            name = "accumulate" if accumulate else "step"
            raise ArgumentError(name, f"more than {MAX_SETS} sets; use longer sets or fewer days")
        next_us = begin_us + step_us
        if accumulate:
            next_us = begin_of_unit(accumulate, begin_us // 1000, ahead=1) * 1000
        found.append(Window(begin_us, min(next_us, window.end_us)))
        begin_us = next_us
    return tuple(found)


def _step_us(text: str) -> int:
    step_us = parse_duration(text, option="step", forms="1h, 1d or 1w") * 1000
    if step_us <= 0 or step_us % HOUR_US:
        raise ArgumentError("step", f"invalid duration {shown(text)}; give whole hours, such as 1d")
    return step_us
