"""The page's part of readings under our own names, in base units: `own.csv` beside this module.

The page's part under our own names that is no reading of a device: facts, containers, events.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from agent.exposition.device import Read, ShownDevice, read_at
from agent.exposition.gpu_events import GpuEvents, nvlink_link_bytes_totals
from agent.exposition.holders import NodeHolder, Share, find_shares
from agent.exposition.node_state import Snapshot
from agent.exposition.text import Labels, SampleLine, write_family, write_labels
from agent.settings import Profile
from gpuledger.records import NodeSample

FILE: Final = Path(__file__).with_name("own.csv")
LABELS: Final = ("gpu_uuid", "gpu_index", "model")


class OwnFamily(NamedTuple):
    """A family of readings of devices."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    meaning: str
    """Its help text."""
    members: Sequence[tuple[str, Read]]
    """Further labels, written, with what reads the value."""
    label_names: tuple[str, ...]
    """Names of the further labels."""
    profile: Profile
    """The least profile that shows it."""

    def is_in(self, profile: Profile) -> bool:
        """Return whether a profile shows the family."""
        return profile in ("full", self.profile)


@cache
def own_families() -> tuple[OwnFamily, ...]:
    """Return the families of devices in their order."""
    found: dict[str, OwnFamily] = {}
    with FILE.open(newline="") as lines:
        for name, kind, meaning, path, further, profile in csv.reader(
            line for line in lines if not line.startswith("#")
        ):
            labels = [tuple(pair.split("=", 1)) for pair in further.split(",") if pair]
            family = found.setdefault(
                name,
                OwnFamily(name, kind, meaning, [], tuple(pair[0] for pair in labels), profile),  # type: ignore[arg-type]  # a test holds the file to the profiles
            )
            written = write_labels([(pair[0], pair[1]) for pair in labels])
            family.members.append(("," + written if written else "", read_at(path)))  # type: ignore[attr-defined]  # a list while it is built
    return tuple(found.values())


def write_own(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the families that a profile shows."""
    written = [(one, write_labels(device_labels(one, now.sample.node))) for one in now.devices]
    for family in own_families():
        if not family.is_in(profile):
            continue
        samples = _samples(family, written)
        yield from write_family(family.name, family.kind, family.meaning, samples)


def device_labels(device: ShownDevice, node: str) -> list[tuple[str, str]]:
    """Return the labels of a device's readings; those that the remote-write sink sends as well."""
    reading, facts = device.reading, device.facts
    model = reading.model or (facts and facts.model) or ""
    values = (reading.uuid, str(reading.index), model)
    return [("node", node), *zip(LABELS, values, strict=True)]


def _samples(family: OwnFamily, written: Iterable[tuple[ShownDevice, str]]) -> Iterator[SampleLine]:
    for device, labels in written:
        for further, read in family.members:
            value = read(device)
            if value is not None and not isinstance(value, str):
                yield SampleLine(labels + further, value)


class Constant(NamedTuple):
    """A family that is not a reading of a device."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    meaning: str
    """Its help text."""
    label_names: tuple[str, ...]
    """Names of its labels beside `node`."""
    profile: Profile = "lean"
    """The least profile that shows it."""


_GPU: Final = ("gpu_uuid", "gpu_index")
_CONTAINER: Final = (*_GPU, "namespace", "pod", "container", "pod_uid", "container_id")
NODE_INFO: Final = Constant(
    "gpuledger_node_info",
    "gauge",
    "What the node's GPUs are driven by.",
    ("boot_id", "driver_version", "nvml_version", "cuda_driver_version"),
)
TICK_TIME: Final = Constant(
    "gpuledger_node_tick_timestamp_seconds",
    "gauge",
    "End of the interval that the newest tick covers, since the epoch.",
    (),
)
GPU_INFO: Final = Constant(
    "gpuledger_node_gpu_info",
    "gauge",
    "What a GPU or a MIG instance is.",
    (
        *_GPU,
        "model",
        "pci_bus_id",
        "serial",
        "vbios_version",
        "architecture",
        "parent_uuid",
        "gpu_instance",
        "compute_instance",
        "mig_profile",
    ),
)
UP: Final = Constant(
    "gpuledger_node_gpu_up",
    "gauge",
    "1 while the GPU answers; 0 where it is known and does not, or is lost.",
    _GPU,
)
RECOVERY: Final = Constant(
    "gpuledger_node_gpu_recovery_action_info",
    "gauge",
    "What the driver asks for so that the GPU works again.",
    (*_GPU, "action"),
)
FABRIC: Final = Constant(
    "gpuledger_node_gpu_fabric_info",
    "gauge",
    "How far the GPU's registration with the NVLink fabric is.",
    (*_GPU, "state"),
    profile="full",
)
NVLINK_BYTES: Final = Constant(
    "gpuledger_node_gpu_nvlink_bytes_total",
    "counter",
    "Bytes over one NVLink, both ways, data alone; read every few seconds.",
    (*_GPU, "nvlink"),
    profile="full",
)
ALLOCATION: Final = Constant(
    "gpuledger_node_gpu_allocation_info",
    "gauge",
    "A device, or a share of one, that the kubelet has given to a container.",
    (*_GPU[:1], "device_id", "resource", "namespace", "pod", "container", "replica", "claim"),
)
CONTAINER_BUSY: Final = Constant(
    "gpuledger_container_gpu_busy_ratio",
    "gauge",
    "Share of the tick in which the container's kernels ran on the GPU.",
    _CONTAINER,
)
CONTAINER_MEMORY: Final = Constant(
    "gpuledger_container_gpu_memory_bytes",
    "gauge",
    "Device memory that the container's processes hold.",
    _CONTAINER,
)
XIDS: Final = Constant(
    "gpuledger_node_gpu_xids_total", "counter", "XIDs since the agent's start.", (*_GPU, "xid")
)
INCIDENTS: Final = Constant(
    "gpuledger_node_gpu_incidents_total",
    "counter",
    "Incidents since the agent's start.",
    (*_GPU, "kind", "severity"),
)
CONSTANTS: Final = (
    NODE_INFO,
    TICK_TIME,
    GPU_INFO,
    UP,
    ALLOCATION,
    RECOVERY,
    FABRIC,
    NVLINK_BYTES,
    XIDS,
    INCIDENTS,
    CONTAINER_BUSY,
    CONTAINER_MEMORY,
)


def write_facts(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the families that a profile shows."""
    node = ("node", now.sample.node)
    yield from _write(NODE_INFO, [(_node_labels(now), 1)])
    yield from _write(TICK_TIME, [([node], now.sample.time_ns / 1e9)])
    yield from _write(GPU_INFO, ((_gpu_info(one, node), 1) for one in now.devices))
    yield from _write(ALLOCATION, ((labels, 1) for labels in _allocations(now.sample, node)))
    for constant, values_of in _BY_DEVICE:
        if profile not in ("full", constant.profile):
            continue
        rows = (
            (list(zip(constant.label_names[:2], _pair(one), strict=True)), one)
            for one in now.devices
        )
        yield from _write(
            constant,
            (
                ([node, *labels, *further], value)
                for labels, one in rows
                for further, value in values_of(one)
            ),
        )
    yield from _write_events(now, node)
    yield from _write_containers(now, node)


def _write(constant: Constant, rows: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    samples = (SampleLine(write_labels(labels), value) for labels, value in rows)
    return write_family(constant.name, constant.kind, constant.meaning, samples)


def _pair(device: ShownDevice) -> tuple[str, str]:
    return device.reading.uuid, str(device.reading.index)


def _node_labels(now: Snapshot) -> Labels:
    inventory = next((one.node for one in now.devices if one.node), None)
    values = [(name, getattr(inventory, name, None) or "") for name in NODE_INFO.label_names[1:]]
    return [("node", now.sample.node), ("boot_id", now.sample.boot_id), *values]


def _gpu_info(device: ShownDevice, node: tuple[str, str]) -> Labels:
    reading = device.reading
    facts = [
        (name, getattr(device.facts, name, None) or "")
        for name in ("pci_bus_id", "serial", "vbios_version", "architecture")
    ]
    instance = [
        (name, "" if value is None else str(value))
        for name, value in (
            ("parent_uuid", reading.parent_uuid),
            ("gpu_instance", reading.gpu_instance),
            ("compute_instance", reading.compute_instance),
            ("mig_profile", reading.mig_profile),
        )
    ]
    return [*device_labels(device, node[1]), *facts, *instance]


def _allocations(sample: NodeSample, node: tuple[str, str]) -> Iterator[Labels]:
    seen = set()
    for one in sample.allocations:
        labels = (
            node,
            ("gpu_uuid", one.gpu_uuid),
            ("device_id", one.device_id),
            ("resource", one.resource_name),
            ("namespace", one.namespace),
            ("pod", one.pod),
            ("container", one.container),
            ("replica", one.replica or ""),
            ("claim", one.claim or ""),
        )
        if labels not in seen:
            seen.add(labels)
            yield labels


def _up(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
    if device.reading.parent_uuid is None:
        yield [], int(not device.is_silent and not device.is_lost)


def _nvlink_bytes(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
    for link, total in nvlink_link_bytes_totals(device.health).items():
        yield [("nvlink", link)], total


def _recovery(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
    if device.health and device.health.recovery_action:
        yield [("action", device.health.recovery_action)], 1


def _fabric(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
    if device.health and device.health.fabric_state:
        yield [("state", device.health.fabric_state)], 1


def _xids(events: GpuEvents) -> Iterator[tuple[Labels, float]]:
    for xid, count in events.xids.items():
        yield [("xid", str(xid))], count


def _incidents(events: GpuEvents) -> Iterator[tuple[Labels, float]]:
    for (kind, severity), count in events.incidents.items():
        yield [("kind", kind), ("severity", severity)], count


def _write_events(now: Snapshot, node: tuple[str, str]) -> Iterator[str]:
    for constant, counts_of in ((XIDS, _xids), (INCIDENTS, _incidents)):
        rows = (
            ([node, ("gpu_uuid", uuid), ("gpu_index", index), *further], count)
            for uuid, (index, events) in now.events.items()
            for further, count in counts_of(events)
        )
        yield from _write(constant, rows)


_BY_DEVICE: Final[
    Sequence[tuple[Constant, Callable[[ShownDevice], Iterator[tuple[Labels, float]]]]]
] = (
    (UP, _up),
    (RECOVERY, _recovery),
    (FABRIC, _fabric),
    (NVLINK_BYTES, _nvlink_bytes),
)


def _write_containers(now: Snapshot, node: tuple[str, str]) -> Iterator[str]:
    shares = find_shares(now.sample, now.names)
    rows: list[tuple[Labels, Share]] = [
        ([node, *zip(_GPU, _pair(device), strict=True), *_holder_labels(share.holder)], share)
        for device in now.devices
        for share in shares.get(device.reading.uuid, ())
    ]
    busy = ((labels, one.busy_ratio) for labels, one in rows if one.busy_ratio is not None)
    yield from _write(CONTAINER_BUSY, busy)
    held = ((labels, one.memory_bytes) for labels, one in rows if one.memory_bytes is not None)
    yield from _write(CONTAINER_MEMORY, held)


def _holder_labels(holder: NodeHolder) -> Labels:
    return list(zip(_CONTAINER[2:], holder, strict=True))
