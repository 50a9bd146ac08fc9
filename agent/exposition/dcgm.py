"""The page's part that dcgm-exporter's users know: its names, types, help texts and labels.

Here lives which values a family has. Whose a series is, `rows` decides.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

from agent.exposition.counters import Counter
from agent.exposition.fields import SEVERAL_UNIT, Field
from agent.exposition.holders import Share
from agent.exposition.multi_series import SEVERAL, EventWindow
from agent.exposition.node_state import Snapshot
from agent.exposition.rows import RowWriter, SeriesRow
from agent.exposition.text import SampleLine, write_family, write_labels
from agent.exposition.units import unit_of
from gpuledger.xids import find_xid

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
        for field, kind, meaning in self._shown:
            found = list(self._samples(field, rows.of(field), now))
            for name, is_old in self._names_of(field):
                samples = (SampleLine(old if is_old else new, value) for old, new, value in found)
                yield from write_family(name, kind, meaning, samples)

    def _names_of(self, field: Field) -> Iterator[tuple[str, bool]]:
        if self._names != "new":
            yield field.old, True
        if self._names == "new" or (self._names == "both" and field.new != field.old):
            yield field.new, False

    def _samples(
        self, field: Field, rows: Sequence[SeriesRow], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        """Yield the labels by old names, those by new names, and the value, of each series."""
        if field.unit == SEVERAL_UNIT:
            yield from self._several(field, rows, now)
            return
        values = [field.read(row.device) for row in rows]
        covered = _gpus_with_instances(rows, values)
        for row, value in zip(rows, values, strict=True):
            if value is None or isinstance(value, str) or row.device.reading.uuid in covered:
                continue
            extra = _xid_labels(int(value)) if field.old == _XID else ""
            yield row.old_labels + extra, row.new_labels + extra, value
            for share, old_labels, new_labels in row.shares:
                part = _part_of(field.old, share, row, value)
                if part is not None:
                    yield old_labels, new_labels, part

    def _several(
        self, field: Field, rows: Sequence[SeriesRow], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        window = EventWindow(now.since_ns, self._window_ms)
        for row in rows:
            for labels, value in SEVERAL[field.path](row.device, window):
                extra = "," + write_labels(labels)
                yield row.old_labels + extra, row.new_labels + extra, value


def _xid_labels(xid: int) -> str:
    words = find_xid(xid).meaning if xid else "No Error"
    return "," + write_labels([("err_code", str(xid)), ("err_msg", words)])


def _gpus_with_instances(rows: Iterable[SeriesRow], values: Iterable[object]) -> set[str]:
    """Return the GPUs whose instances have a value: theirs is the sum, which would count twice."""
    return {
        row.device.reading.parent_uuid
        for row, value in zip(rows, values, strict=True)
        if value is not None and row.device.reading.parent_uuid is not None
    }


def _part_of(name: str, share: Share, row: SeriesRow, value: float) -> float | None:
    """Return a container's part of a device's value, where that can be told."""
    if name == "DCGM_FI_DEV_FB_USED":
        return None if share.memory_bytes is None else float(_MIB(share.memory_bytes) or 0)
    if share.busy_ratio is None:
        return None
    if name == "DCGM_FI_DEV_GPU_UTIL":
        return float(_PERCENT(share.busy_ratio) or 0)
    if name == "DCGM_FI_PROF_GR_ENGINE_ACTIVE":
        return _divide(value, share.busy_ratio, row.device.reading.utilization_ratio)
    return None


def _divide(value: float, part: float, whole: float | None) -> float | None:
    """Return the part of a value that a part of the kernel time stands for."""
    if whole is None:
        return None
    return min(value, value * part / whole) if whole else 0.0
