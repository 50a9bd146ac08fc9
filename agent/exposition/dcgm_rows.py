"""The rows of the part that dcgm-exporter's users know: a device, its labels written, its holders.

Here the rules stand for whom a series is, so that no sum over a family counts a GPU twice that one
container has: docs/adr/011-exposition-names.md says why. Values are `dcgm`'s business.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal, NamedTuple

from agent.exposition.dcgm_fields import Field
from agent.exposition.device import ShownDevice
from agent.exposition.holders import NodeHolder, Share, exclusive_holder, find_shares
from agent.exposition.node_state import Snapshot
from agent.exposition.text import Labels, write_labels

SHARE_LABEL: Final = "gpuledger_share"


class SeriesRow(NamedTuple):
    """One device with its labels written, by the old names and by the new."""

    device: ShownDevice
    """The device whose values are shown."""
    old_labels: str
    """Its labels, fields among them by their old names."""
    new_labels: str
    """The same by the new names."""
    shares: Sequence[tuple[Share, str, str]]
    """What containers use of a device that none has alone, with labels by old and new names."""


class Rows(NamedTuple):
    """The devices of a tick, told apart in the two ways that families need."""

    devices: Sequence[SeriesRow]
    """A row for each GPU, each MIG instance and each compute instance."""
    memories: Sequence[SeriesRow]
    """The same, with one row for all compute instances that have one memory."""

    def of(self, field: Field) -> Sequence[SeriesRow]:
        """Return the rows of a field's family."""
        return self.memories if field.is_of_memory else self.devices


@dataclass(frozen=True, kw_only=True)
class RowWriter:
    """Writes what is the same in all families of a tick."""

    label_fields: Sequence[Field]
    """The fields that stand as labels on every series."""
    host_label: str
    """The label with the node's name, or `none`."""
    pod_series: bool
    """Whether containers that share a device get series."""
    dashes_in_model_name: bool = False
    """Whether `modelName` has dashes in place of its blanks."""

    def write(self, now: Snapshot) -> Rows:
        """Write the rows of a tick."""
        shares = find_shares(now.sample, now.names) if self.pod_series else {}
        split = _find_split(now.devices)
        rows = [
            self._row(device, now, shares, is_split=_instance_of(device) in split)
            for device in now.devices
        ]
        return Rows(rows, list(self._memories(rows, now, shares, split)))

    def _memories(
        self,
        rows: Iterable[SeriesRow],
        now: Snapshot,
        shares: Mapping[str, list[Share]],
        split: Mapping[tuple[str, int | None], list[ShownDevice]],
    ) -> Iterator[SeriesRow]:
        """Yield one row for each memory: those of one GPU instance read the same one."""
        for row in rows:
            siblings = split.get(_instance_of(row.device))
            if siblings is None:
                yield row
            elif row.device is siblings[0]:
                found = chain.from_iterable(shares.get(one.reading.uuid, ()) for one in siblings)
                held = _merge_memory(found)
                yield self._written(row.device, self._identity(row.device), now, None, held)

    def _row(
        self,
        device: ShownDevice,
        now: Snapshot,
        shares: Mapping[str, list[Share]],
        *,
        is_split: bool,
    ) -> SeriesRow:
        reading = device.reading
        identity = self._identity(device)
        if is_split:
            identity.append(("GPU_C_ID", str(reading.compute_instance)))
        holder = exclusive_holder(reading, now.sample.allocations)
        found = () if holder else shares.get(reading.uuid, ())
        return self._written(device, identity, now, holder, found)

    def _written(
        self,
        device: ShownDevice,
        identity: Labels,
        now: Snapshot,
        holder: NodeHolder | None,
        shares: Iterable[Share],
    ) -> SeriesRow:
        if self.host_label != "none":
            identity = [*identity, (self.host_label, now.sample.node)]
        old = [*identity, *self._read(device, "old")]
        new = [*identity, *self._read(device, "new")]
        tail = _pod_labels(holder) if holder else ()
        return SeriesRow(
            device=device,
            old_labels=write_labels([*old, *tail]),
            new_labels=write_labels([*new, *tail]),
            shares=[
                (
                    one,
                    write_labels([*old, *_share_labels(one.holder)]),
                    write_labels([*new, *_share_labels(one.holder)]),
                )
                for one in shares
                if one.holder.pod
            ],
        )

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

    def _read(self, device: ShownDevice, names: Literal["old", "new"]) -> Iterator[tuple[str, str]]:
        for field in self.label_fields:
            value = field.read(device)
            if value is not None:
                yield getattr(field, names), str(value)


def _pod_labels(holder: NodeHolder) -> Labels:
    return [
        ("container", holder.container),
        ("namespace", holder.namespace),
        ("pod", holder.pod),
    ]


def _share_labels(holder: NodeHolder) -> Labels:
    return [*_pod_labels(holder), ("pod_uid", holder.pod_uid), (SHARE_LABEL, "pod")]


def _merge_memory(shares: Iterable[Share]) -> Iterable[Share]:
    """Return what each container holds in all: it may have processes on several of them."""
    held: dict[NodeHolder, Share] = {}
    for one in shares:
        before = held.get(one.holder)
        known = [x.memory_bytes for x in (before, one) if x and x.memory_bytes is not None]
        held[one.holder] = Share(one.holder, None, sum(known) if known else None)
    return held.values()


def _instance_of(device: ShownDevice) -> tuple[str, int | None]:
    return device.gpu_uuid, device.reading.gpu_instance


def _find_split(
    devices: Iterable[ShownDevice],
) -> Mapping[tuple[str, int | None], list[ShownDevice]]:
    """Find the GPU instances with several compute instances, which DCGM's labels do not tell."""
    found: dict[tuple[str, int | None], list[ShownDevice]] = {}
    for device in devices:
        if device.reading.parent_uuid is not None:
            found.setdefault(_instance_of(device), []).append(device)
    return {key: siblings for key, siblings in found.items() if len(siblings) > 1}
