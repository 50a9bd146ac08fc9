"""The page's part that dcgm-exporter's users know: its names, types, help texts and labels.

Here the rules stand for whom a series is, so that no sum over a family counts a GPU twice that one
container has: docs/adr/011-exposition-names.md says why.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from agent.exposition.counters import Counter
from agent.exposition.devices import Device
from agent.exposition.fields import SEVERAL_UNIT, Field
from agent.exposition.holders import Holder, Share, find_shares, whole_holder
from agent.exposition.several import SEVERAL, Window
from agent.exposition.text import Labels, Sample, write_family, write_labels
from agent.exposition.units import unit_of
from agent.exposition.view import Snapshot
from gpuledger.xids import find_xid

Names = Literal["old", "new", "both"]
SHARE_LABEL: Final = "gpuledger_share"
_MIB: Final = unit_of("MiB")
_PERCENT: Final = unit_of("%")
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"


class _Row(NamedTuple):
    """One device with its labels written, by the old names and by the new."""

    device: Device
    old_labels: str
    new_labels: str
    shares: Sequence[tuple[Share, str, str]]


class DcgmPage:
    """Writes the families of a list of counters."""

    def __init__(
        self,
        counters: Iterable[Counter],
        *,
        names: Names,
        host_label: str,
        window_seconds: float = 300.0,
        pod_series: bool = True,
    ) -> None:
        counters = tuple(counters)
        self._shown = [one for one in counters if one.kind != "label"]
        self._label_fields = [one.field for one in counters if one.kind == "label"]
        self._names = names
        self._host_label = host_label
        self._window_ms = str(round(window_seconds * 1e3))
        self._pod_series = pod_series

    def write(self, now: Snapshot) -> Iterator[str]:
        """Write the families line by line."""
        rows = self._rows(now)
        for field, kind, meaning in self._shown:
            found = list(self._samples(field, rows, now))
            for name, is_old in self._names_of(field):
                samples = (Sample(old if is_old else new, value) for old, new, value in found)
                yield from write_family(name, kind, meaning, samples)

    def _names_of(self, field: Field) -> Iterator[tuple[str, bool]]:
        if self._names != "new":
            yield field.old, True
        if self._names == "new" or (self._names == "both" and field.new != field.old):
            yield field.new, False

    def _rows(self, now: Snapshot) -> list[_Row]:
        shares = find_shares(now.sample, now.names) if self._pod_series else {}
        instances = _count_instances(now.devices)
        return [self._row(device, now, shares, instances) for device in now.devices]

    def _row(
        self,
        device: Device,
        now: Snapshot,
        shares: Mapping[str, list[Share]],
        instances: Mapping[tuple[str, int | None], int],
    ) -> _Row:
        reading = device.reading
        is_split = instances.get((device.gpu_uuid, reading.gpu_instance), 0) > 1
        identity = _identity(device, is_split=is_split)
        if self._host_label != "none":
            identity.append((self._host_label, now.sample.node))
        old, new = self._own_labels(device, "old"), self._own_labels(device, "new")
        holder = whole_holder(reading, now.sample.allocations)
        tail = _pod_labels(holder) if holder else []
        pods = [] if holder else [one for one in shares.get(reading.uuid, ()) if one.holder.pod]
        return _Row(
            device=device,
            old_labels=write_labels([*identity, *old, *tail]),
            new_labels=write_labels([*identity, *new, *tail]),
            shares=[
                (
                    one,
                    write_labels([*identity, *old, *_share_labels(one.holder)]),
                    write_labels([*identity, *new, *_share_labels(one.holder)]),
                )
                for one in pods
            ],
        )

    def _own_labels(self, device: Device, names: Literal["old", "new"]) -> list[tuple[str, str]]:
        read = ((getattr(field, names), field.read(device)) for field in self._label_fields)
        return [(name, str(value)) for name, value in read if value is not None]

    def _samples(
        self, field: Field, rows: Sequence[_Row], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        """Give the labels by old names, those by new names, and the value, of each series."""
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
        self, field: Field, rows: Sequence[_Row], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        window = Window(now.since_ns, self._window_ms)
        for row in rows:
            for labels, value in SEVERAL[field.path](row.device, window):
                extra = "," + write_labels(labels)
                yield row.old_labels + extra, row.new_labels + extra, value


def _identity(device: Device, *, is_split: bool) -> list[tuple[str, str]]:
    reading, facts = device.reading, device.facts
    labels = [
        ("gpu", str(reading.index)),
        ("UUID", device.gpu_uuid),
        ("pci_bus_id", (facts and facts.pci_bus_id) or ""),
        ("device", f"nvidia{reading.index}"),
        ("modelName", (facts and facts.model) or reading.model or ""),
    ]
    if reading.parent_uuid is not None:
        labels.append(("GPU_I_PROFILE", reading.mig_profile or ""))
        labels.append(("GPU_I_ID", str(reading.gpu_instance)))
        if is_split:
            labels.append(("GPU_C_ID", str(reading.compute_instance)))
    return labels


def _pod_labels(holder: Holder) -> Labels:
    return [
        ("container", holder.container),
        ("namespace", holder.namespace),
        ("pod", holder.pod),
    ]


def _share_labels(holder: Holder) -> Labels:
    return [*_pod_labels(holder), ("pod_uid", holder.pod_uid), (SHARE_LABEL, "pod")]


def _xid_labels(xid: int) -> str:
    words = find_xid(xid).meaning if xid else "No Error"
    return "," + write_labels([("err_code", str(xid)), ("err_msg", words)])


def _count_instances(devices: Iterable[Device]) -> dict[tuple[str, int | None], int]:
    """Count the compute instances of each GPU instance: DCGM's labels do not tell them apart."""
    counts: dict[tuple[str, int | None], int] = {}
    for device in devices:
        if device.reading.parent_uuid is not None:
            key = (device.gpu_uuid, device.reading.gpu_instance)
            counts[key] = counts.get(key, 0) + 1
    return counts


def _gpus_with_instances(rows: Iterable[_Row], values: Iterable[object]) -> set[str]:
    """Give the GPUs whose instances have a value: theirs is the sum, which would count twice."""
    return {
        row.device.reading.parent_uuid
        for row, value in zip(rows, values, strict=True)
        if value is not None and row.device.reading.parent_uuid is not None
    }


def _part_of(name: str, share: Share, row: _Row, value: float) -> float | None:
    """Give a container's part of a device's value, where that can be told."""
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
    """Give the part of a value that a part of the kernel time stands for."""
    if whole is None:
        return None
    return min(value, value * part / whole) if whole else 0.0
