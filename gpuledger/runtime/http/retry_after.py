"""`Retry-After`: how long a server asks to be left alone. Pure."""

from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Final

MAX_SECONDS: Final = 600.0
"""The longest wait that is granted: a server that is back must not go unnoticed for hours."""
# What the standard library raises of dates that are none, are in no calendar or in no time zone.
_NO_DATE: Final = (ValueError, TypeError, OverflowError, IndexError)


def retry_after_seconds(header: str, *, now: datetime) -> float:
    """Return the seconds to wait, of 0 to `MAX_SECONDS`, from a header in seconds or as a date.

    It is 0 where the header says nothing that can be read, or a time that has passed.
    """
    seconds = 0.0
    try:
        seconds = float(header)
    except ValueError:
        with suppress(*_NO_DATE):
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
    return min(seconds, MAX_SECONDS) if seconds > 0 else 0.0  # not a number is not above 0 either
