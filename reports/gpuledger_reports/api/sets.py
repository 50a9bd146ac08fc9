"""The sets of an answer: a window cut into the steps that a request names. Pure; in UTC."""

from typing import Final, Literal

from gpuledger.errors import ArgumentError
from gpuledger.time_ranges import begin_of_unit, parse_duration
from gpuledger_reports.api.parameters import shown
from gpuledger_reports.reading.times import HOUR_US, Window

Accumulate = Literal["", "all", "hour", "day", "week", "month"]
MAX_SETS: Final = 400
"""Maximum number of sets in an answer: each is a bill."""
_ACCUMULATE: Final[dict[str, Accumulate]] = {
    **dict.fromkeys(("", "false", "False", "0", "none"), ""),
    **dict.fromkeys(("true", "True", "1", "all"), "all"),
    "hour": "hour",
    "day": "day",
    "week": "week",
    "month": "month",
}


def parse_accumulate(text: str) -> Accumulate:
    """Return what sets are summed up to; raises `ArgumentError`."""
    try:
        return _ACCUMULATE[text]
    except KeyError as error:
        raise ArgumentError(
            "accumulate", f"{shown(text)} is none of true, false, hour, day, week, month"
        ) from error


def sets_of(window: Window, *, step: str | None, accumulate: Accumulate) -> tuple[Window, ...]:
    """Return the windows of the sets that are asked for, in order; raises `ArgumentError`.

    `accumulate` counts before `step`. Sets of days, weeks and months begin and end where those do.
    """
    if accumulate == "all" or (not accumulate and not step):
        return (window,)
    step_us = 0 if accumulate else _step_us(step or "")
    found: list[Window] = []
    begin_us = window.begin_us
    while begin_us < window.end_us:
        if len(found) == MAX_SETS:
            name = "accumulate" if accumulate else "step"
            raise ArgumentError(name, f"more than {MAX_SETS} sets; ask for longer or fewer ones")
        next_us = begin_us + step_us
        if accumulate:
            next_us = begin_of_unit(accumulate, begin_us // 1000, ahead=1) * 1000
        found.append(Window(begin_us, min(next_us, window.end_us)))
        begin_us = next_us
    return tuple(found)


def _step_us(text: str) -> int:
    step_us = parse_duration(text, option="step") * 1000
    if step_us <= 0 or step_us % HOUR_US:
        raise ArgumentError("step", f"{shown(text)} is no number of whole hours; give 1h, 1d, 1w")
    return step_us
