"""Drops samples with impossible time stamps before anything is derived from them.

A single sample with a stamp far in the future would make all later samples look old.
"""

from collections import Counter
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from gpuledger.clock import NS_PER_US
from gpuledger_agent.core.raw import ClockReading, FastPoll, RawGpuSample
from gpuledger_agent.core.readings import TIMESTAMP_US

_AHEAD_US: Final = 60_000_000
_FIELDS: Final = ("samples", "memory_samples", "process_samples")

_Answer = TypeVar("_Answer", FastPoll, RawGpuSample)


def drop_impossible(
    answer: _Answer, at: ClockReading, *, ahead_us: int | None, dropped: Counter[str]
) -> tuple[_Answer, int | None]:
    """Return an answer without samples with impossible time stamps, and the new `ahead_us`.

    `ahead_us` is the largest difference so far between a time stamp and the monotonic clock; `None`
    before the first stamp. `at` is the time of the answer. The numbers of dropped samples are added
    to `dropped`, by field.

    A driver stamps samples by the machine's wall clock or by a clock that started later. If the
    wall clock was set back, stamps from before the change remain possible. If several stamps are
    too far in the future but agree with each other, they are from another clock and are kept.
    """
    stamps = {one.timestamp_us for name in _FIELDS for one in getattr(answer, name) or ()}
    if not stamps:
        return answer, ahead_us
    monotonic_us, lowest_us = at.monotonic_ns // NS_PER_US, TIMESTAMP_US[0]
    first_us, latest_us = min(stamps), at.time_ns // NS_PER_US + _AHEAD_US
    if ahead_us is not None:
        latest_us = max(latest_us, monotonic_us + ahead_us + _AHEAD_US)
    if latest_us < first_us <= TIMESTAMP_US[1]:
        agreeing = [s for s in stamps if s <= min(first_us + _AHEAD_US, TIMESTAMP_US[1])]
        latest_us = max(agreeing) if len(agreeing) > 1 else latest_us
    latest_us = min(latest_us, TIMESTAMP_US[1])
    newest_us = max((stamp for stamp in stamps if stamp <= latest_us), default=None)
    if newest_us is not None:
        own_us = newest_us - monotonic_us
        ahead_us = own_us if ahead_us is None else max(ahead_us, own_us)
    if newest_us == max(stamps) and first_us >= lowest_us:
        return answer, ahead_us
    kept: dict[str, Any] = {}
    for name in _FIELDS:
        if (answered := getattr(answer, name)) is not None:
            kept[name] = tuple(
                one for one in answered if lowest_us <= one.timestamp_us <= latest_us
            )
            dropped[name] += len(answered) - len(kept[name])
    return replace(answer, **kept), ahead_us
