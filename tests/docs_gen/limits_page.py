"""reference/limits.md: fixed bounds, from the constants that enforce them and their docstrings."""

from collections.abc import Iterator
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.codegen import constant_docstrings
from tests.docs_gen.component_limits import COMPONENT_LIMITS
from tests.docs_gen.limit import Section
from tests.docs_gen.markdown import head, table
from tests.docs_gen.record_limits import RECORD_LIMITS

_HEAD: Final = head(
    "Limits",
    audience="SRE",
    about="""\
This page lists the fixed limits of records, messages, requests, queues and files. Use it to check
whether a node, a pod or a request fits. You cannot change these limits. [Settings](settings.md)
lists the limits that you can change.""",
)
SECTIONS: Final = (*RECORD_LIMITS, *COMPONENT_LIMITS)


def limits_page() -> str:
    """Return the page, in Markdown."""
    lines = _HEAD.splitlines()
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", *([section.effect, ""] if section.effect else [])]
        lines += _table(section)
    return "\n".join([*lines, ""])


def _table(section: Section) -> Iterator[str]:
    """Yield a section's table; it has a column of effects only if a limit names its own."""
    has_effects = any(limit.above for limit in section.limits)
    columns = ("limit", "value", *(["above it"] if has_effects else []), "note")
    rows = (
        (
            limit.item,
            show_value(limit.name, getattr(limit.module, limit.name)),
            *([limit.above] if has_effects else []),
            constant_docstrings(limit.module).get(limit.name, ""),
        )
        for limit in section.limits
    )
    return table(columns, rows)


def show_value(name: str, value: float) -> str:
    """Return a value with the unit at the end of its constant's name."""
    unit = name.rpartition("_")[2]
    if unit == "BYTES":
        return _show_bytes(int(value))
    if unit == "NS":
        return _show_seconds(value / NS_PER_SECOND)
    if unit == "SECONDS":
        return _show_seconds(value)
    suffix = " characters" if unit in {"LENGTH", "CHARACTERS", "PREFIX", "NAME"} else ""
    return f"{value:,}{suffix}"


def _show_bytes(value: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power and value % (1 << power) == 0:
            return f"{value >> power:,} {unit}"
    return f"{value:,} bytes"


def _show_seconds(value: float) -> str:
    for seconds, unit in ((3600, "h"), (60, "min")):
        if value > seconds and value % seconds == 0:
            return f"{value / seconds:g} {unit}"
    return f"{value:g} s"
