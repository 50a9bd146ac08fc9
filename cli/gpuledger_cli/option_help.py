"""Help texts that commands share: options for times, examples and exit codes.

`gpuledger.time_ranges` defines the forms of times.
"""

from collections.abc import Mapping
from typing import Final

from cyclopts import Parameter

from gpuledger.errors import ArgumentError
from gpuledger.time_ranges import (
    DURATION_FORMS,
    RANGE_FORMS,
    TIME_FORMS,
    parse_duration,
    write_duration,
)

COMMON_CODES: Final = {
    2: "invalid input, or a service is unavailable",
    5: "internal error; please report it",
    130: "interrupted",
}
_DAY_SECONDS: Final = 86_400.0


def time_option(meaning: str, *, name: str | None = None) -> Parameter:
    """Return the parameter of a time option; `meaning` is a sentence without its full stop."""
    return Parameter(name=name, help=f"{meaning}. Time: {TIME_FORMS}.", allow_leading_hyphen=True)


def range_option(meaning: str) -> Parameter:
    """Return the parameter of a time range option."""
    return Parameter(help=f"{meaning}. Range (UTC): {RANGE_FORMS}.", allow_leading_hyphen=True)


def duration_option(
    meaning: str, *, name: str | None = None, forms: str = DURATION_FORMS
) -> Parameter:
    """Return the parameter of a duration option; `forms` are examples, or the text of `limits`."""
    return Parameter(name=name, help=f"{meaning}. Duration: {forms}.", allow_leading_hyphen=True)


def limits(minimum: float, maximum: float = _DAY_SECONDS) -> str:
    """Return the limits of a duration, for help and errors."""
    return f"{minimum:g}s to {write_duration(round(maximum * 1000))}"


def parse_seconds(
    text: str, *, option: str, minimum: float = 0, maximum: float = _DAY_SECONDS
) -> float:
    """Return a duration in seconds; raises `ArgumentError` if it is out of bounds."""
    bounds = limits(minimum, maximum)
    seconds = parse_duration(text, option=option, forms=f"a number and a unit, {bounds}") / 1000
    if not minimum <= seconds <= maximum:
        raise ArgumentError(option, f"invalid duration {text!r}; it must be {bounds}")
    return seconds


def epilogue(
    text: str = "", *, examples: Mapping[str, str], codes: Mapping[int, str] | None = None
) -> str:
    """Return the text below the options of a command: examples by title, and exit codes."""
    shown = "\n".join(f"  # {title}\n  {command}" for title, command in examples.items())
    all_codes = {0: "success", **(codes or {})}
    all_codes |= {code: text for code, text in COMMON_CODES.items() if code not in all_codes}
    written = "\n".join(f"  {code:<3}  {all_codes[code]}" for code in sorted(all_codes))
    parts = [text.strip(), f"Examples:\n{shown}", f"Exit codes:\n{written}"]
    return "\n\n".join(part for part in parts if part)
