"""The metrics with dcgm-exporter's names, types, help texts and labels.

`RowWriter` writes the labels of each device and of the containers that use the device. The rules
for labels ensure that no sum over a family counts a GPU twice; see ADR 011. `DcgmPage` writes the
families' values. `dcgm_fields` defines the fields, including fields with several series per device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, NamedTuple

from gpuledger.ledger.allocated_parts import jobs_by_device, jobs_of
from gpuledger.xids import find_xid
from gpuledger_agent.dcgm_devices import DcgmDevices, parse_devices
from gpuledger_agent.exposition.dcgm_fields import (
    MULTI_SERIES,
    MULTI_SERIES_UNIT,
    Counter,
    EventWindow,
    Field,
)
from gpuledger_agent.exposition.device import ShownDevice, unit_of
from gpuledger_agent.exposition.families import (
    Label,
    Labels,
    SampleLine,
    write_family,
    write_labels,
)
from gpuledger_agent.exposition.node_state import Snapshot
from gpuledger_agent.exposition.pod_lookup import NodeContainer, PodShare

SHARE_LABEL: Final = "gpuledger_share"
_OLD_LABELS: Final = {
    "UUID": "uuid",
    "container": "container_name",
    "namespace": "pod_namespace",
    "pod": "pod_name",
}
"""The names of labels in dcgm-exporter 1.x, by their present names."""


class SeriesRow(NamedTuple):
    """One device with its labels in the text format, under old and under new DCGM names."""

    device: ShownDevice
    """The device whose values are shown."""
    old_labels: str
    """The device's labels. DCGM fields that are labels have their old names."""
    new_labels: str
    """The device's labels. DCGM fields that are labels have their new names."""
    shares: Sequence[tuple[PodShare, str, str]]
    """The use of the device by each container, with the container's labels under old and under new
    names; empty if the device is allocated to one container or containers have no own series."""


class Rows(NamedTuple):
    """A tick's rows in two lists: one for most families, and one for families of memory values."""

    devices: Sequence[SeriesRow]
    """One row for each GPU and each MIG instance; compute instances have separate rows."""
    memories: Sequence[SeriesRow]
    """The same rows, except that compute instances that share memory have one common row."""

    def of(self, field: Field) -> Sequence[SeriesRow]:
        """Return `memories` if the field measures memory, otherwise `devices`."""
        return self.memories if field.is_of_memory else self.devices


@dataclass(frozen=True, kw_only=True)
class RowWriter:
    """Makes the rows of a tick: each device with its labels, which are the same in all families."""

    label_fields: Sequence[tuple[str, Field]]
    """The fields that are labels of every series; before each, its name in series with old names.
    """
    host_label: str
    """Name of the label that contains the node's name, or `none`."""
    pod_series: bool
    """Whether containers that share a device have separate series."""
    dashes_in_model_name: bool = False
    """Whether spaces in the label `modelName` are replaced by dashes."""
    shows_pod_uid: bool = False
    """Whether the series of a device allocated to one container have a `pod_uid` label."""
    devices: DcgmDevices
    """The devices that have series."""
    has_old_labels: bool = False
    """Whether some labels have their names in dcgm-exporter 1.x."""

    def write(self, now: Snapshot) -> Rows:
        """Return the rows of the tick in the snapshot."""
        shares = now.tick_containers.shares() if self.pod_series else {}
        split = _find_split(now.devices)
        jobs = jobs_by_device(now.sample.job_allocations or ())
        devices, memories = [], []
        for device in now.devices:
            reading = device.reading
            is_instance = reading.parent_uuid is not None
            if not self.devices.shows(reading.index, is_instance=is_instance):
                continue
            siblings = split.get(device.gpu_instance)
            allocatee = now.tick_containers.exclusive(reading)
            # If the device is allocated to one container, the device's own series have that
            # container's labels.
            found = () if allocatee else shares.get(reading.uuid, ())
            labels = self._identity(device)
            if siblings:
                # DCGM's labels do not distinguish compute instances of one GPU instance.
                labels = [*labels, ("GPU_C_ID", str(reading.compute_instance))]
            allocated_jobs = jobs_of(reading, jobs, is_allocated=allocatee is not None)
            # Several jobs are not shown, because one series per job would count the device
            # several times. Our own metrics show all jobs.
            job = allocated_jobs[0] if len(allocated_jobs) == 1 else None
            row = self._row(device, labels, now, allocatee, found, job=job)
            devices.append(row)
            if siblings is None:
                memories.append(row)
            elif device is siblings[0]:
                # The siblings share a memory, so a row for each would count it several times.
                by_container = _merge_memory(
                    chain.from_iterable(
                        shares.get(sibling.reading.uuid, ()) for sibling in siblings
                    )
                )
                identity = self._identity(device)
                memories.append(self._row(device, identity, now, None, by_container, job=job))
        return Rows(devices, memories)

    def _row(
        self,
        device: ShownDevice,
        identity: Labels,
        now: Snapshot,
        allocatee: NodeContainer | None,
        shares: Iterable[PodShare],
        *,
        job: str | None,
    ) -> SeriesRow:
        if self.host_label != "none":
            identity = [*identity, (self.host_label, now.sample.node)]
        values = [(name, field.new, field.read(device)) for name, field in self.label_fields]
        known = [(old, new, str(value)) for old, new, value in values if value is not None]
        old = [*identity, *((name, value) for name, _, value in known)]
        new = [*identity, *((name, value) for _, name, value in known)]
        tail = [*allocatee.dcgm_labels, *self._uid_label(allocatee)] if allocatee else []
        if job is not None:
            tail = [*tail, ("hpc_job", job)]
        written = []
        for share in shares:
            # As in dcgm-exporter, there are no series without a pod's name.
            if share.user.pod:
                own = [
                    *share.user.dcgm_labels,
                    ("pod_uid", share.user.pod_uid),
                    (SHARE_LABEL, "pod"),
                ]
                written.append((share, self._text([*old, *own]), self._text([*new, *own])))
        return SeriesRow(
            device=device,
            old_labels=self._text([*old, *tail]),
            new_labels=self._text([*new, *tail]),
            shares=written,
        )

    def _text(self, labels: Sequence[Label]) -> str:
        if self.has_old_labels:
            labels = [(_OLD_LABELS.get(name, name), value) for name, value in labels]
        return write_labels(labels)

    def _uid_label(self, allocatee: NodeContainer) -> Labels:
        return [("pod_uid", allocatee.pod_uid)] if self.shows_pod_uid else []

    def _identity(self, device: ShownDevice) -> list[tuple[str, str]]:
        reading, facts = device.reading, device.facts
        model = (facts and facts.model) or reading.model or ""
        labels = [
            ("gpu", str(reading.index)),
            ("UUID", device.gpu_uuid),
            ("pci_bus_id", (facts and facts.pci_bus_id) or ""),
            ("device", f"nvidia{reading.index}"),
            ("modelName", model.replace(" ", "-") if self.dashes_in_model_name else model),
        ]
        if reading.parent_uuid is not None:
            labels.append(("GPU_I_PROFILE", reading.mig_profile or ""))
            labels.append(("GPU_I_ID", str(reading.gpu_instance)))
        return labels


def _merge_memory(shares: Iterable[PodShare]) -> Iterable[PodShare]:
    """Return one share per container, with its total memory on several compute instances."""
    by_container: dict[NodeContainer, PodShare] = {}
    for share in shares:
        parts = (by_container.get(share.user), share)
        known = [part.memory_bytes for part in parts if part and part.memory_bytes is not None]
        by_container[share.user] = PodShare(share.user, None, sum(known) if known else None)
    return by_container.values()


def _find_split(
    devices: Iterable[ShownDevice],
) -> Mapping[tuple[str, int | None], list[ShownDevice]]:
    """Return the compute instances of each GPU instance that contains several, by GPU instance."""
    found: dict[tuple[str, int | None], list[ShownDevice]] = {}
    for device in devices:
        if device.reading.parent_uuid is not None:
            found.setdefault(device.gpu_instance, []).append(device)
    return {key: siblings for key, siblings in found.items() if len(siblings) > 1}


Names = Literal["old", "new", "both"]
_MIB: Final = unit_of("MiB")
_PERCENT: Final = unit_of("%")
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"


class DcgmPage:
    """Writes the metric families of the DCGM fields that a list selects."""

    def __init__(
        self,
        counters: Iterable[Counter],
        *,
        names: Names,
        host_label: str,
        event_window_seconds: float = 300.0,
        pod_series: bool = False,
        dashes_in_model_name: bool = False,
        shows_pod_uid: bool = False,
        devices: str = "f",
        has_old_labels: bool = False,
    ) -> None:
        # If only old names are shown, a series has the field's name in the list, which may be the
        # new name.
        listed = [(one.name if names == "old" else one.field.old, one) for one in counters]
        self._shown = [(name, counter) for name, counter in listed if counter.kind != "label"]
        self._names = names
        self._window_ms = str(round(event_window_seconds * 1e3))
        self._rows = RowWriter(
            label_fields=[(name, one.field) for name, one in listed if one.kind == "label"],
            host_label=host_label,
            pod_series=pod_series,
            dashes_in_model_name=dashes_in_model_name,
            shows_pod_uid=shows_pod_uid,
            devices=parse_devices(devices),
            has_old_labels=has_old_labels,
        )

    def write(self, now: Snapshot) -> Iterator[str]:
        """Yield the lines of all families."""
        rows = self._rows.write(now)
        for old_name, (_, field, kind, help_text) in self._shown:
            found = list(self._samples(field, rows.of(field), now))
            names = [] if self._names == "new" else [(old_name, True)]
            # A field that was not renamed is written only once.
            if self._names == "new" or (self._names == "both" and field.new != field.old):
                names.append((field.new, False))
            for name, is_old in names:
                samples = (SampleLine(old if is_old else new, value) for old, new, value in found)
                yield from write_family(name, kind, help_text, samples)

    def _samples(
        self, field: Field, rows: Sequence[SeriesRow], now: Snapshot
    ) -> Iterator[tuple[str, str, float]]:
        """Yield a field's series: its labels with old names, its labels with new names, its value.

        The names are those of the DCGM fields that are labels.
        """
        if field.unit == MULTI_SERIES_UNIT:
            window = EventWindow(now.since_ns, self._window_ms)
            for row in rows:
                for labels, number in MULTI_SERIES[field.path](row.device, window):
                    extra = "," + write_labels(labels)
                    yield row.old_labels + extra, row.new_labels + extra, number
            return
        values = [field.read(row.device) for row in rows]
        # If a GPU's instances have values, leave out the GPU, because sums would count it twice.
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


def _part_of(name: str, share: PodShare, row: SeriesRow, value: float) -> float | None:
    """Return a container's part of a device's value of the DCGM field `name`.

    Return `None` if the part is unknown, or if the field's values are not divided among containers.
    """
    if name == "DCGM_FI_DEV_FB_USED":
        return None if share.memory_bytes is None else float(_MIB(share.memory_bytes) or 0)
    busy_ratio, whole = share.busy_ratio, row.device.reading.utilization_ratio
    if busy_ratio is None:
        return None
    if name == "DCGM_FI_DEV_GPU_UTIL":
        return float(_PERCENT(busy_ratio) or 0)
    if name == "DCGM_FI_PROF_GR_ENGINE_ACTIVE" and whole is not None:
        # The chip measures only the whole device, so divide in proportion to the kernels' time.
        return min(value, value * busy_ratio / whole) if whole else 0.0
    return None
