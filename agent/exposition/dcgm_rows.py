"""The rows of the part that dcgm-exporter's users know: a device, its labels written, its holders.

Here the rules stand for whom a series is, so that no sum over a family counts a GPU twice that one
container has: docs/adr/011-exposition-names.md says why. What a value is, `dcgm` decides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from agent.exposition.dcgm_fields import Field
from agent.exposition.device import ShownDevice
from agent.exposition.holders import NodeHolder, Share, find_shares
from agent.exposition.node_state import Snapshot
from agent.exposition.text import Labels, write_labels
from gpuledger.ledger.holders import exclusive_holder

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
        devices, memories = [], []
        for device in now.devices:
            reading = device.reading
            siblings = split.get(_instance_of(device))
            container = exclusive_holder(reading, now.sample.allocations)
            holder = NodeHolder(*container) if container else None
            # Whoever has all of a device has its own series.
            found = () if holder else shares.get(reading.uuid, ())
            labels = self._identity(device)
            if siblings:
                # DCGM's labels do not tell the compute instances of one GPU instance apart.
                labels = [*labels, ("GPU_C_ID", str(reading.compute_instance))]
            row = self._row(device, labels, now, holder, found)
            devices.append(row)
            if siblings is None:
                memories.append(row)
            elif device is siblings[0]:
                # All of them read one memory: a row for each would count it several times.
                held = _merge_memory(
                    chain.from_iterable(
                        shares.get(sibling.reading.uuid, ()) for sibling in siblings
                    )
                )
                memories.append(self._row(device, self._identity(device), now, None, held))
        return Rows(devices, memories)

    def _row(
        self,
        device: ShownDevice,
        identity: Labels,
        now: Snapshot,
        holder: NodeHolder | None,
        shares: Iterable[Share],
    ) -> SeriesRow:
        if self.host_label != "none":
            identity = [*identity, (self.host_label, now.sample.node)]
        values = [(field, field.read(device)) for field in self.label_fields]
        known = [(field, str(value)) for field, value in values if value is not None]
        old = [*identity, *((field.old, value) for field, value in known)]
        new = [*identity, *((field.new, value) for field, value in known)]
        tail = _pod_labels(holder) if holder else ()
        written = []
        for share in shares:
            # What has no name here gets no series: dcgm-exporter would show none either.
            if share.holder.pod:
                own = [
                    *_pod_labels(share.holder),
                    ("pod_uid", share.holder.pod_uid),
                    (SHARE_LABEL, "pod"),
                ]
                written.append((share, write_labels([*old, *own]), write_labels([*new, *own])))
        return SeriesRow(
            device=device,
            old_labels=write_labels([*old, *tail]),
            new_labels=write_labels([*new, *tail]),
            shares=written,
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


def _pod_labels(holder: NodeHolder) -> Labels:
    return [
        ("container", holder.container),
        ("namespace", holder.namespace),
        ("pod", holder.pod),
    ]


def _merge_memory(shares: Iterable[Share]) -> Iterable[Share]:
    """Return what each container holds in all: it may have processes on several of them."""
    held: dict[NodeHolder, Share] = {}
    for share in shares:
        parts = (held.get(share.holder), share)
        known = [part.memory_bytes for part in parts if part and part.memory_bytes is not None]
        held[share.holder] = Share(share.holder, None, sum(known) if known else None)
    return held.values()


def _instance_of(device: ShownDevice) -> tuple[str, int | None]:
    return device.gpu_uuid, device.reading.gpu_instance


def _find_split(
    devices: Iterable[ShownDevice],
) -> Mapping[tuple[str, int | None], list[ShownDevice]]:
    """Return the GPU instances that are cut further, each with its compute instances."""
    found: dict[tuple[str, int | None], list[ShownDevice]] = {}
    for device in devices:
        if device.reading.parent_uuid is not None:
            found.setdefault(_instance_of(device), []).append(device)
    return {key: siblings for key, siblings in found.items() if len(siblings) > 1}
