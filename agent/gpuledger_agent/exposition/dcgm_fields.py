"""The table of supported DCGM fields, and the parser for lists that select fields.

dcgm-exporter's own fields (`DCGM_EXP_…`) have several series per device with additional labels:
events in a window, links to other GPUs, health. The health does not come from DCGM. This module
evaluates it, as far as the readings allow.

The table is `dcgm_fields.csv` in this directory; fields are found by their old or new name. A list
has dcgm-exporter's format: `FIELD, gauge|counter|untyped|label, help`. Errors in a list are
reported with file, line and reason. A line that dcgm-exporter accepts is never an error, even if it
has no effect here: the line is skipped, logged and counted.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import structlog

from gpuledger.errors import UserError
from gpuledger.records import GpuHealth
from gpuledger.small_files import read_small_file
from gpuledger.texts import find_near, shorten, shorten_middle
from gpuledger_agent.exposition.device import Read, ShownDevice, read_at
from gpuledger_agent.exposition.families import Labels
from gpuledger_agent.metrics import COUNTERS_SKIPPED

Kind = Literal["gauge", "counter", "label"]
_log = structlog.get_logger(__name__)
# Before 4.8.3, dcgm-exporter also accepted the last two, for fields with a single value.
_UNTYPED: Final = ("untyped", "histogram", "summary")
_KINDS: Final = (*get_args(Kind), _UNTYPED[0])
_COLUMNS: Final = 3
_SHOWN_CHARACTERS: Final = 80
_DCGM_NAME: Final = re.compile(r"DCGM_(?:FI|EXP)_[A-Z0-9_]+")
FILE: Final = Path(__file__).with_name("dcgm_fields.csv")
NAMES_FILE: Final = Path(__file__).with_name("dcgm_names.txt")
MULTI_SERIES_UNIT: Final = "multi_series"
"""The text in the table's unit column for a field with several series per device."""
_SAME: Final = "="
_OF_MEMORY: Final = {
    "reading.memory_used_bytes",
    "reading.memory_total_bytes",
    "reading.memory_reserved_bytes",
    "derived.memory_free_bytes",
    "derived.memory_used_ratio",
}


class Field(NamedTuple):
    """A DCGM field that the agent supports, from the table."""

    old: str
    """The name before DCGM 4.6, which dcgm-exporter uses."""
    new: str
    """The name since DCGM 4.6."""
    kind: Kind
    """The type in dcgm-exporter's default list."""
    is_default: bool
    """Whether dcgm-exporter's default list contains the field."""
    help: str
    """The help text in dcgm-exporter's default list."""
    path: str
    """The location of the value: a part of `ShownDevice` and a field of that part, separated by a
    dot."""
    unit: str
    """DCGM's unit; empty if the value needs no conversion."""
    read: Read
    """Takes a device and returns the value in DCGM's unit."""

    @property
    def is_text(self) -> bool:
        """Whether the value is text, which can only be a label."""
        return self.unit == "text"

    @property
    def is_of_memory(self) -> bool:
        """Whether the field measures memory. Compute instances of one GPU instance share it."""
        return self.path in _OF_MEMORY


@cache
def all_fields() -> tuple[Field, ...]:
    """Return all supported fields, in the table's order."""
    with FILE.open(newline="") as lines:
        rows = csv.reader(line for line in lines if not line.startswith("#"))
        return tuple(
            Field(
                old=old,
                new=old if new == _SAME else new,
                kind=kind,  # type: ignore[arg-type]  # a test holds the file to the kinds
                is_default=default == "on",
                help=help_text,
                path=path,
                unit=unit,
                read=read_at(path, unit),
            )
            for old, new, kind, default, help_text, path, unit in rows
        )


def find_field(name: str) -> Field | None:
    """Return the supported field with this old or new name; `None` if there is no such field."""
    return next((field for field in all_fields() if name in (field.old, field.new)), None)


def is_dcgm_name(name: str) -> bool:
    """Return whether DCGM or dcgm-exporter has a field with this name, supported or not."""
    return name in dcgm_names()


def nearest_name(name: str) -> str | None:
    """Return the DCGM name most similar to `name`; `None` if no name is similar."""
    return find_near(name, sorted(dcgm_names()))


def dcgm_names() -> frozenset[str]:
    """Return the names of all fields of DCGM and dcgm-exporter, supported or not.

    The result is not cached, because only lists with unsupported names need it.
    """
    lines = NAMES_FILE.read_text(encoding="ascii").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


class Counter(NamedTuple):
    """One line of a list of DCGM fields to show: a field, its type and its help text."""

    name: str
    """The field's name in the list: its old or its new name."""
    field: Field
    """The field."""
    kind: str
    """The type: `gauge`, `counter`, `untyped` or `label`."""
    help: str
    """The help text."""


def default_counters() -> tuple[Counter, ...]:
    """Return the counters of dcgm-exporter's default list."""
    return tuple(
        Counter(field.old, field, field.kind, field.help)
        for field in all_fields()
        if field.is_default
    )


class Skipped(NamedTuple):
    """A line of a list that dcgm-exporter accepts, but that shows nothing here."""

    line: int
    """The number of the line, from 1."""
    name: str
    """The name of the field."""
    reason: str
    """Why the line shows nothing."""


_MAX_BYTES: Final = 1024 * 1024
"""Maximum size of a file that lists counters; DCGM's own list has 15 KiB."""


def read_counters(path: Path) -> tuple[Counter, ...]:
    """Return the counters that a file lists; log a warning with the fields that are skipped.

    Raise `UserError` if the file cannot be read or a line is invalid.
    """
    try:
        text = read_small_file(path, max_bytes=_MAX_BYTES).decode()
    except OSError as error:
        raise UserError(
            f"exposition.counters_file: cannot read {path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"exposition.counters_file: {path} is not UTF-8 text") from error
    skipped: list[Skipped] = []
    counters = tuple(parse_counters(text.splitlines(), name=str(path), skip=skipped.append))
    COUNTERS_SKIPPED.set(len(skipped))
    if skipped:
        lines = [f"{line}: {name}: {reason}" for line, name, reason in skipped]
        _log.warning("counters_skipped", file=str(path), lines=lines)
    return counters


def _why_absent(name: str) -> str:
    if is_dcgm_name(name):
        return "not supported"
    nearest = nearest_name(name)
    return f"unknown, similar to {nearest}" if nearest else "unknown"


def parse_counters(
    lines: Iterable[str], *, name: str, skip: Callable[[Skipped], None]
) -> Iterator[Counter]:
    """Yield the counters of a list, each field once; call `skip` with each line that is skipped.

    Raise `UserError` with the list's name, the line and the reason if a line is invalid.
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            listed, kind, help_text = _split(line)
        except (ValueError, csv.Error) as error:
            raise UserError(f"{name}:{number}: {shorten_middle(str(error))}") from error
        field = find_field(listed)
        if field is None:
            # A newer DCGM may have the field.
            skip(Skipped(number, listed, _why_absent(listed)))
        elif field.is_text and kind != "label":
            skip(Skipped(number, listed, "has a text value; set its type to label"))
        elif field.unit == MULTI_SERIES_UNIT and kind == "label":
            skip(Skipped(number, listed, "has several values; its type cannot be label"))
        elif field.old in seen:
            skip(Skipped(number, listed, f"the same field as in line {seen[field.old]}"))
        else:
            seen[field.old] = number
            yield Counter(listed, field, kind, help_text)


def _split(line: str) -> tuple[str, str, str]:
    """Return a line's name, type and help text.

    Raise `ValueError` or `csv.Error` if the line is invalid.
    """
    cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    if len(cells) != _COLUMNS:
        raise ValueError(
            f"expected 3 columns (field, type, help), got {len(cells)};"
            " put a help text with commas in double quotes"
        )
    name, kind, help_text = cells
    # A cell may be very long.
    shown = shorten(name, _SHOWN_CHARACTERS)
    if kind in _UNTYPED:
        kind = "untyped"
    if kind not in _KINDS:
        raise ValueError(
            f"{shown}: expected one of {', '.join(_KINDS)},"
            f" got {shorten(kind, _SHOWN_CHARACTERS)!r}"
        )
    if _DCGM_NAME.fullmatch(name) is None and not is_dcgm_name(name):
        raise ValueError(f"not the name of a DCGM field: {shown!r}")
    return shown, kind, help_text


class EventWindow(NamedTuple):
    """The recent time in which events are counted."""

    since_ns: int
    """Start of the window on the monotonic clock."""
    label: str
    """Length of the window in milliseconds, as dcgm-exporter writes it."""


Series = Iterator[tuple[Labels, float]]
Verdict = tuple[int, str]
"""DCGM's code for the severity, and DCGM's name of the error."""
_PASS: Final = 0
_WARN: Final = 10
_FAIL: Final = 20
_FINE: Final = (_PASS, "DCGM_FR_OK")
_ALL: Final = "ALL"
# XID 79, or 0 if no XID was seen, because XIDs before the agent's start are unknown.
_OFF_THE_BUS: Final = (0, 79)
_THERMAL_REASONS: Final = 0x20 | 0x40
_POWER_BRAKE_REASON: Final = 0x80
_LINKS: Final = (
    ("ok", "OK"),
    ("chipset_not_supported", "ChipsetNotSupported"),
    ("gpu_not_supported", "GPUNotSupported"),
    ("topology_not_supported", "TopologyNotSupported"),
    ("disabled_by_regkey", "DisabledByRegKey"),
    ("not_supported", "NotSupported"),
)
_LINK_CODES: Final = {name: (code, words) for code, (name, words) in enumerate(_LINKS)}
_UNKNOWN_LINK: Final = (len(_LINKS), "Unknown")


class MultiSeries:
    """Functions for the fields with several series per device.

    Each function yields the additional labels and the value of each of a device's series.
    """

    @staticmethod
    def xids(device: ShownDevice, window: EventWindow) -> Series:
        """Yield the number of times that each XID occurred in the window."""
        if device.events:
            yield from count_kinds("xid", device.events.recent_xids(window.since_ns), window)

    @staticmethod
    def clock_events(device: ShownDevice, window: EventWindow) -> Series:
        """Yield the number of times that throttling started in the window, by reason."""
        # The throttle reasons of an unresponsive GPU are unknown.
        if device.events and not device.is_unresponsive:
            found = device.events.recent_clock_events(window.since_ns)
            yield from count_kinds("clock_event", found, window)

    @staticmethod
    def peers(device: ShownDevice, _: EventWindow) -> Series:
        """Yield DCGM's code for the state of the NVLinks to each other GPU of the node."""
        if device.facts is None or device.node is None or device.is_unresponsive:
            return
        # MIG instances, which have no events, share their GPU's facts: show the links only once.
        if device.events is None:
            return
        indices = {gpu.uuid: gpu.index for gpu in device.node.gpus}
        for uuid, status in (device.facts.nvlink_peers or {}).items():
            if uuid in indices:
                code, words = _LINK_CODES.get(status, _UNKNOWN_LINK)
                yield [("peer_gpu", str(indices[uuid])), ("link_status", words)], code

    @staticmethod
    def health(device: ShownDevice, _: EventWindow) -> Series:
        """Yield a severity for each of DCGM's health watches, and the highest severity.

        Health watches that the readings do not cover are left out.
        """
        health, throttling = device.health, device.throttling
        reasons = throttling.reasons if throttling else None
        watches: list[tuple[str, Verdict | None]] = [
            ("MEM", memory_verdict(health) if health else None),
            ("NVLINK", nvlink_verdict(health) if health else None),
        ]
        if reasons is not None:
            hot = (_WARN, "DCGM_FR_CLOCK_THROTTLE_THERMAL")
            braked = (_WARN, "DCGM_FR_CLOCK_THROTTLE_POWER")
            watches.append(("THERMAL", hot if reasons & _THERMAL_REASONS else _FINE))
            watches.append(("POWER", braked if reasons & _POWER_BRAKE_REASON else _FINE))
        verdicts = [(watch, verdict) for watch, verdict in watches if verdict]
        if device.is_lost:
            # DCGM uses the XID reported with the loss; earlier readings no longer apply.
            xid = device.events.last_xid if device.events else 0
            error = "DCGM_FR_FALLEN_OFF_BUS" if xid in _OFF_THE_BUS else "DCGM_FR_XID_ERROR"
            verdicts = [(_ALL, (_FAIL, error))]
        elif verdicts:
            verdicts.append((_ALL, max(verdict for _, verdict in verdicts)))
        for watch, (code, error) in verdicts:
            yield [("health_watch", watch), ("health_error_code", error)], code


def count_kinds(label: str, found: Mapping[str, int], window: EventWindow) -> Series:
    """Yield one series for each kind of event in `found`, with the number of events.

    If there are no events, yield a single series with 0, as dcgm-exporter does.
    """
    head = ("window_size_in_ms", window.label)
    if not found:
        yield [head], 0
    for what, count in found.items():
        yield [head, (label, what)], count


def memory_verdict(health: GpuHealth) -> Verdict | None:
    """Return the worst severity of a GPU's memory errors, with DCGM's name of the error.

    Return `None` if the GPU does not report memory errors.
    """
    if health.ecc_uncorrected_volatile_total is None and health.remapped_rows_failed is None:
        return None
    # The worst verdict comes first.
    if health.remapped_rows_failed:
        return _FAIL, "DCGM_FR_ROW_REMAP_FAILURE"
    if health.ecc_uncorrected_volatile_total:
        return _FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED"
    if health.remapped_rows_pending:
        return _WARN, "DCGM_FR_PENDING_ROW_REMAP"
    if health.retired_pages_pending:
        return _WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"
    return _FINE


def nvlink_verdict(health: GpuHealth) -> Verdict | None:
    """Return the worst severity of a GPU's NVLink errors, with DCGM's name of the error.

    Return `None` if the GPU has no links that count errors. GPUs until Ampere have counters for all
    links together, and Hopper has counters per link. Blackwell has other counters per link; on
    Blackwell, a successful recovery is only a warning.
    """
    recoveries = (
        health.nvlink_recoveries_total,
        _sum(health.nvlink_link_recoveries_totals),
        _sum(health.nvlink_link_failed_recoveries_totals),
    )
    if all(count is None for count in recoveries):
        return None
    if any(recoveries):
        return _FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL"
    errors = (
        health.nvlink_replays_total,
        health.nvlink_crc_data_errors_total,
        health.nvlink_crc_flit_errors_total,
        _sum(health.nvlink_link_replays_totals),
        _sum(health.nvlink_link_crc_errors_totals),
        _sum(health.nvlink_link_integrity_errors_totals),
        _sum(health.nvlink_link_successful_recoveries_totals),
    )
    return (_WARN, "DCGM_FR_NVLINK_ERROR_THRESHOLD") if any(errors) else _FINE


def _sum(by_link: dict[str, int] | None) -> int | None:
    return None if by_link is None else sum(by_link.values())


MULTI_SERIES: Final[dict[str, Callable[[ShownDevice, EventWindow], Series]]] = {
    "multi_series.xids": MultiSeries.xids,
    "multi_series.clock_events": MultiSeries.clock_events,
    "multi_series.peers": MultiSeries.peers,
    "multi_series.health": MultiSeries.health,
}
"""The functions that yield a device's series of a field, by the field's path in the table."""
