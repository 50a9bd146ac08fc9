"""The page's part that dcgm-exporter's users know: its names, types, help texts and labels.

Here lives which values a family has. Whose a series is, `dcgm_rows` decides. dcgm-exporter's own
fields (`DCGM_EXP_…`) have several series of a device, told apart by labels of their own: events of
a window, peers, health. Health is no word of DCGM's: it is evaluated from the readings, as far as
they show it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from agent.exposition.dcgm_fields import MULTI_SERIES_UNIT, Counter, Field
from agent.exposition.dcgm_rows import RowWriter, SeriesRow
from agent.exposition.device import ShownDevice, unit_of
from agent.exposition.holders import Share
from agent.exposition.node_state import Snapshot
from agent.exposition.text import Labels, SampleLine, write_family, write_labels
from gpuledger.records import GpuHealth
from gpuledger.xids import find_xid


class EventWindow(NamedTuple):
    """Over which time events are recent."""

    since_ns: int
    """When it begins, by the clock that never goes back."""
    label: str
    """Its length in milliseconds, as dcgm-exporter writes it."""


Series = Iterator[tuple[Labels, float]]
Verdict = tuple[int, str]
"""How bad it is, and DCGM's name of the error."""
_PASS: Final = 0
_WARN: Final = 10
_FAIL: Final = 20
_FINE: Final = (_PASS, "DCGM_FR_OK")
_ALL: Final = "ALL"
# 79, and none: the XIDs that came before the agent's start are not known.
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


def _xids(device: ShownDevice, window: EventWindow) -> Series:
    if device.events:
        yield from _counted("xid", device.events.recent_xids(window.since_ns), window)


def _clock_events(device: ShownDevice, window: EventWindow) -> Series:
    # Of a GPU that does not answer nobody knows why its clocks are down.
    if device.events and not device.is_silent:
        found = device.events.recent_clock_events(window.since_ns)
        yield from _counted("clock_event", found, window)


def _counted(label: str, found: dict[str, int], window: EventWindow) -> Series:
    """Yield a series for each kind, or one zero without a kind, as dcgm-exporter does."""
    head = ("window_size_in_ms", window.label)
    if not found:
        yield [head], 0
    for what, count in found.items():
        yield [head, (label, what)], count


def _peers(device: ShownDevice, _: EventWindow) -> Series:
    if device.facts is None or device.node is None or device.events is None or device.is_silent:
        return
    indices = {gpu.uuid: gpu.index for gpu in device.node.gpus}
    for uuid, status in (device.facts.nvlink_peers or {}).items():
        if uuid in indices:
            code, words = _LINK_CODES.get(status, _UNKNOWN_LINK)
            yield [("peer_gpu", str(indices[uuid])), ("link_status", words)], code


def _health(device: ShownDevice, _: EventWindow) -> Series:
    health, throttling = device.health, device.throttling
    reasons = throttling.reasons if throttling else None
    watches: list[tuple[str, Verdict | None]] = [
        ("MEM", _memory_verdict(health) if health else None),
        ("NVLINK", _nvlink_verdict(health) if health else None),
    ]
    if reasons is not None:
        hot = (_WARN, "DCGM_FR_CLOCK_THROTTLE_THERMAL")
        braked = (_WARN, "DCGM_FR_CLOCK_THROTTLE_POWER")
        watches.append(("THERMAL", hot if reasons & _THERMAL_REASONS else _FINE))
        watches.append(("POWER", braked if reasons & _POWER_BRAKE_REASON else _FINE))
    verdicts = [(watch, verdict) for watch, verdict in watches if verdict]
    if device.is_lost:
        # DCGM goes by the XID that came with the loss; the readings of before say nothing now.
        xid = device.events.last_xid if device.events else 0
        error = "DCGM_FR_FALLEN_OFF_BUS" if xid in _OFF_THE_BUS else "DCGM_FR_XID_ERROR"
        verdicts = [(_ALL, (_FAIL, error))]
    elif verdicts:
        verdicts.append((_ALL, max(verdict for _, verdict in verdicts)))
    for watch, (code, error) in verdicts:
        yield [("health_watch", watch), ("health_error_code", error)], code


def _memory_verdict(health: GpuHealth) -> Verdict | None:
    # A GPU that counts no errors has no verdict, rather than a good one.
    if health.ecc_uncorrected_volatile_total is None and health.remapped_rows_failed is None:
        return None
    # The worst comes first.
    if health.remapped_rows_failed:
        return _FAIL, "DCGM_FR_ROW_REMAP_FAILURE"
    if health.ecc_uncorrected_volatile_total:
        return _FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED"
    if health.remapped_rows_pending:
        return _WARN, "DCGM_FR_PENDING_ROW_REMAP"
    if health.retired_pages_pending:
        return _WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"
    return _FINE


def _nvlink_verdict(health: GpuHealth) -> Verdict | None:
    if health.nvlink_recoveries_total is None:
        return None
    if health.nvlink_recoveries_total:
        return _FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL"
    errors = (
        health.nvlink_replays_total,
        health.nvlink_crc_data_errors_total,
        health.nvlink_crc_flit_errors_total,
    )
    return (_WARN, "DCGM_FR_NVLINK_ERROR_THRESHOLD") if any(errors) else _FINE


MULTI_SERIES: Final[dict[str, Callable[[ShownDevice, EventWindow], Series]]] = {
    "multi_series.xids": _xids,
    "multi_series.clock_events": _clock_events,
    "multi_series.peers": _peers,
    "multi_series.health": _health,
}
"""What gives the series, by the path in the table."""


Names = Literal["old", "new", "both"]
_MIB: Final = unit_of("MiB")
_PERCENT: Final = unit_of("%")
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"


class DcgmPage:
    """Writes the families of a list of counters."""

    def __init__(
        self,
        counters: Iterable[Counter],
        *,
        names: Names,
        host_label: str,
        event_window_seconds: float = 300.0,
        pod_series: bool = False,
        dashes_in_model_name: bool = False,
    ) -> None:
        counters = tuple(counters)
        self._shown = [one for one in counters if one.kind != "label"]
        self._names = names
        self._window_ms = str(round(event_window_seconds * 1e3))
        self._rows = RowWriter(
            label_fields=[one.field for one in counters if one.kind == "label"],
            host_label=host_label,
            pod_series=pod_series,
            dashes_in_model_name=dashes_in_model_name,
        )

    def write(self, now: Snapshot) -> Iterator[str]:
        """Write the families line by line."""
        rows = self._rows.write(now)
        for field, kind, help_text in self._shown:
            found = list(self._samples(field, rows.of(field), now))
            names = [] if self._names == "new" else [(field.old, True)]
            # A field that was never renamed stands on the page once.
            if self._names == "new" or (self._names == "both" and field.new != field.old):
                names.append((field.new, False))
            for name, is_old in names:
                samples = (SampleLine(old if is_old else new, value) for old, new, value in found)
                yield from write_family(name, kind, help_text, samples)

    def _samples(
        self, field: Field, rows: Sequence[SeriesRow], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        """Yield the labels by old names, those by new names, and the value, of each series."""
        if field.unit == MULTI_SERIES_UNIT:
            window = EventWindow(now.since_ns, self._window_ms)
            for row in rows:
                for labels, number in MULTI_SERIES[field.path](row.device, window):
                    extra = "," + write_labels(labels)
                    yield row.old_labels + extra, row.new_labels + extra, number
            return
        values = [field.read(row.device) for row in rows]
        # A GPU whose instances have a value is their sum, which would count twice.
        covered = {
            row.device.reading.parent_uuid
            for row, value in zip(rows, values, strict=True)
            if value is not None and row.device.reading.parent_uuid is not None
        }
        for row, value in zip(rows, values, strict=True):
            if value is None or isinstance(value, str) or row.device.reading.uuid in covered:
                continue
            extra = ""
            if field.old == _XID:
                xid = int(value)
                words = find_xid(xid).meaning if xid else "No Error"
                extra = "," + write_labels([("err_code", str(xid)), ("err_msg", words)])
            yield row.old_labels + extra, row.new_labels + extra, value
            for share, old_labels, new_labels in row.shares:
                part = _part_of(field.old, share, row, value)
                if part is not None:
                    yield old_labels, new_labels, part


def _part_of(name: str, share: Share, row: SeriesRow, value: float) -> float | None:
    """Return a container's part of a device's value, where that can be told."""
    if name == "DCGM_FI_DEV_FB_USED":
        return None if share.memory_bytes is None else float(_MIB(share.memory_bytes) or 0)
    busy_ratio, whole = share.busy_ratio, row.device.reading.utilization_ratio
    if busy_ratio is None:
        return None
    if name == "DCGM_FI_DEV_GPU_UTIL":
        return float(_PERCENT(busy_ratio) or 0)
    if name == "DCGM_FI_PROF_GR_ENGINE_ACTIVE" and whole is not None:
        # The chip measures the device alone: in proportion to the kernels' time.
        return min(value, value * busy_ratio / whole) if whole else 0.0
    return None
