"""Times and durations as people write them. Nothing is read from a clock here."""

import re
from datetime import UTC, datetime
from typing import Final

from gpuledger.errors import UserError

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd])")


def parse_moment(text: str, *, option: str, now_ms: int) -> int:
    """Return a time in milliseconds since the epoch; raises `UserError` naming the option."""
    if text == "now":
        return now_ms
    if text.startswith("-") and (seconds := _seconds(text[1:])) is not None:
        return now_ms - round(seconds * 1000)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        hint = " (without Z or an offset it may mean any zone)" if found else ""
        raise UserError(
            f"{option}: {text!r} is no time{hint}; give one such as 2026-11-21T14:00:00Z, how long"
            " ago (-90s, -15m, -1h30m, -1d), or now"
        )
    return round(found.timestamp() * 1000)


def parse_duration(text: str, *, option: str) -> int:
    """Return a duration in milliseconds; raises `UserError` naming the option."""
    seconds = _seconds(text)
    if seconds is None:
        raise UserError(f"{option}: {text!r} is no duration; give one such as 90s, 15m, 1h30m, 1d")
    return round(seconds * 1000)


def write_moment(time_ms: int) -> str:
    """Return a time as `parse_moment` reads, in UTC, without milliseconds where there are none."""
    moment = datetime.fromtimestamp(time_ms / 1000, tz=UTC)
    precision = "milliseconds" if time_ms % 1000 else "seconds"
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def write_duration(duration_ms: int) -> str:
    """Return a duration in its two largest units: `1h 12m`, `3m 5s`, `40s`."""
    left, parts = -(-duration_ms // 1000), []
    for unit, seconds in reversed(_UNITS.items()):
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def _seconds(text: str) -> float | None:
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(part["number"]) * _UNITS[part["unit"]] for part in _PART.finditer(text))
