"""The page's part under our own names, in base units: readings, facts, containers, events.

`native_metrics.csv` beside this module is the table of the readings of devices; what is no reading
of a device is an `InfoFamily`.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from agent.exposition.device import Read, ShownDevice, nvlink_link_bytes_totals, read_at
from agent.exposition.holders import Share, find_shares
from agent.exposition.node_state import Snapshot
from agent.exposition.text import Label, Labels, SampleLine, write_family, write_labels
from agent.settings import Profile
from gpuledger.records import DeviceAllocation

FILE: Final = Path(__file__).with_name("native_metrics.csv")
LABELS: Final = ("gpu_uuid", "gpu_index", "model")


class NativeFamily(NamedTuple):
    """A family of readings of devices."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
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
def native_families() -> tuple[NativeFamily, ...]:
    """Return the families of devices in their order."""
    found: dict[str, NativeFamily] = {}
    with FILE.open(newline="") as lines:
        for name, kind, help_text, path, further, profile in csv.reader(
            line for line in lines if not line.startswith("#")
        ):
            labels = [tuple(pair.split("=", 1)) for pair in further.split(",") if pair]
            family = found.setdefault(
                name,
                NativeFamily(name, kind, help_text, [], tuple(pair[0] for pair in labels), profile),  # type: ignore[arg-type]  # a test holds the file to the profiles
            )
            written = write_labels([(pair[0], pair[1]) for pair in labels])
            family.members.append(("," + written if written else "", read_at(path)))  # type: ignore[attr-defined]  # a list while it is built
    return tuple(found.values())


def write_native(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the families that a profile shows."""
    written = [
        (device, write_labels(device_labels(device, now.sample.node))) for device in now.devices
    ]
    for family in native_families():
        if not family.is_in(profile):
            continue
        samples = (
            SampleLine(labels + further, value)
            for device, labels in written
            for further, read in family.members
            # A text is no value of a gauge: it is a label of an info family.
            if (value := read(device)) is not None and not isinstance(value, str)
        )
        yield from write_family(family.name, family.kind, family.help, samples)


def device_labels(device: ShownDevice, node: str) -> list[tuple[str, str]]:
    """Return the labels of a device's readings; those that the remote-write sink sends as well."""
    reading, facts = device.reading, device.facts
    model = reading.model or (facts and facts.model) or ""
    values = (reading.uuid, str(reading.index), model)
    return [("node", node), *zip(LABELS, values, strict=True)]


class InfoFamily(NamedTuple):
    """A family that is not a reading of a device."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
    """Its help text."""
    label_names: tuple[str, ...]
    """Names of its labels beside `node`."""
    profile: Profile = "lean"
    """The least profile that shows it."""


_GPU: Final = ("gpu_uuid", "gpu_index")
_CONTAINER: Final = (*_GPU, "namespace", "pod", "container", "pod_uid", "container_id")
NODE_INFO: Final = InfoFamily(
    "gpuledger_node_info",
    "gauge",
    "What the node's GPUs are driven by.",
    ("boot_id", "driver_version", "nvml_version", "cuda_driver_version"),
)
TICK_TIME: Final = InfoFamily(
    "gpuledger_node_tick_timestamp_seconds",
    "gauge",
    "End of the interval that the newest tick covers, since the epoch.",
    (),
)
GPU_INFO: Final = InfoFamily(
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
UP: Final = InfoFamily(
    "gpuledger_node_gpu_up",
    "gauge",
    "1 while the GPU answers; 0 where it is known and does not, or is lost.",
    _GPU,
)
RECOVERY: Final = InfoFamily(
    "gpuledger_node_gpu_recovery_action_info",
    "gauge",
    "What the driver asks for so that the GPU works again.",
    (*_GPU, "action"),
)
FABRIC: Final = InfoFamily(
    "gpuledger_node_gpu_fabric_info",
    "gauge",
    "How far the GPU's registration with the NVLink fabric is.",
    (*_GPU, "state"),
    profile="full",
)
NVLINK_BYTES: Final = InfoFamily(
    "gpuledger_node_gpu_nvlink_bytes_total",
    "counter",
    "Bytes over one NVLink, both ways, data alone; read every few seconds.",
    (*_GPU, "nvlink"),
    profile="full",
)
ALLOCATION: Final = InfoFamily(
    "gpuledger_node_gpu_allocation_info",
    "gauge",
    "A device, or a share of one, that the kubelet has given to a container.",
    (*_GPU[:1], "device_id", "resource", "namespace", "pod", "container", "replica", "claim"),
)
CONTAINER_BUSY: Final = InfoFamily(
    "gpuledger_container_gpu_busy_ratio",
    "gauge",
    "Share of the tick in which the container's kernels ran on the GPU.",
    _CONTAINER,
)
CONTAINER_MEMORY: Final = InfoFamily(
    "gpuledger_container_gpu_memory_bytes",
    "gauge",
    "Device memory that the container's processes hold.",
    _CONTAINER,
)
XIDS: Final = InfoFamily(
    "gpuledger_node_gpu_xids_total", "counter", "XIDs since the agent's start.", (*_GPU, "xid")
)
INCIDENTS: Final = InfoFamily(
    "gpuledger_node_gpu_incidents_total",
    "counter",
    "Incidents since the agent's start.",
    (*_GPU, "kind", "severity"),
)
INFO_FAMILIES: Final = (
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
    inventory = next((device.node for device in now.devices if device.node), None)
    versions = [(name, getattr(inventory, name, None) or "") for name in NODE_INFO.label_names[1:]]
    yield from _write(NODE_INFO, [([node, ("boot_id", now.sample.boot_id), *versions], 1)])
    yield from _write(TICK_TIME, [([node], now.sample.time_ns / 1e9)])
    yield from _write(GPU_INFO, ((_gpu_info(device, node), 1) for device in now.devices))
    # Several resources may name one device the same: a series stands on the page once.
    allocations = dict.fromkeys(_allocation_labels(one, node) for one in now.sample.allocations)
    yield from _write(ALLOCATION, ((labels, 1) for labels in allocations))
    for family, values_of in _BY_DEVICE:
        if profile in ("full", family.profile):
            rows = (
                ([node, *_gpu_labels(device), *further], value)
                for device in now.devices
                for further, value in values_of(device)
            )
            yield from _write(family, rows)
    yield from _write_events(now, node)
    yield from _write_containers(now, node)


def _write(family: InfoFamily, rows: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    samples = (SampleLine(write_labels(labels), value) for labels, value in rows)
    return write_family(family.name, family.kind, family.help, samples)


def _gpu_labels(device: ShownDevice) -> Labels:
    return [("gpu_uuid", device.reading.uuid), ("gpu_index", str(device.reading.index))]


def _gpu_info(device: ShownDevice, node: Label) -> Labels:
    facts = ("pci_bus_id", "serial", "vbios_version", "architecture")
    instance = ("parent_uuid", "gpu_instance", "compute_instance", "mig_profile")
    found = [(name, getattr(device.facts, name, None)) for name in facts]
    found += [(name, getattr(device.reading, name)) for name in instance]
    labels = [(name, "" if value is None else str(value)) for name, value in found]
    return [*device_labels(device, node[1]), *labels]


def _allocation_labels(allocation: DeviceAllocation, node: Label) -> tuple[Label, ...]:
    return (
        node,
        ("gpu_uuid", allocation.gpu_uuid),
        ("device_id", allocation.device_id),
        ("resource", allocation.resource_name),
        ("namespace", allocation.namespace),
        ("pod", allocation.pod),
        ("container", allocation.container),
        ("replica", allocation.replica or ""),
        ("claim", allocation.claim or ""),
    )


class _ByDevice:
    """What each device has of a family: further labels, and the value."""

    @staticmethod
    def up(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        if device.reading.parent_uuid is None:
            yield [], int(not device.is_silent and not device.is_lost)

    @staticmethod
    def nvlink_bytes(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        for link, total in nvlink_link_bytes_totals(device.health).items():
            yield [("nvlink", link)], total

    @staticmethod
    def recovery(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        if device.health and device.health.recovery_action:
            yield [("action", device.health.recovery_action)], 1

    @staticmethod
    def fabric(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        if device.health and device.health.fabric_state:
            yield [("state", device.health.fabric_state)], 1


_BY_DEVICE: Final[
    Sequence[tuple[InfoFamily, Callable[[ShownDevice], Iterator[tuple[Labels, float]]]]]
] = (
    (UP, _ByDevice.up),
    (RECOVERY, _ByDevice.recovery),
    (FABRIC, _ByDevice.fabric),
    (NVLINK_BYTES, _ByDevice.nvlink_bytes),
)


def _write_events(now: Snapshot, node: Label) -> Iterator[str]:
    """Yield what happened to each GPU, also to those that are silent."""
    xids: list[tuple[Labels, float]] = []
    incidents: list[tuple[Labels, float]] = []
    for uuid, (index, events) in now.events.items():
        gpu = [node, ("gpu_uuid", uuid), ("gpu_index", index)]
        xids += [([*gpu, ("xid", str(xid))], count) for xid, count in events.xids.items()]
        incidents += [
            ([*gpu, ("kind", kind), ("severity", severity)], count)
            for (kind, severity), count in events.incidents.items()
        ]
    yield from _write(XIDS, xids)
    yield from _write(INCIDENTS, incidents)


def _write_containers(now: Snapshot, node: Label) -> Iterator[str]:
    shares = find_shares(now.sample, now.names)
    rows: list[tuple[Labels, Share]] = [
        (
            [node, *_gpu_labels(device), *zip(_CONTAINER[2:], share.holder, strict=True)],
            share,
        )
        for device in now.devices
        for share in shares.get(device.reading.uuid, ())
    ]
    busy = ((labels, share.busy_ratio) for labels, share in rows if share.busy_ratio is not None)
    yield from _write(CONTAINER_BUSY, busy)
    held = (
        (labels, share.memory_bytes) for labels, share in rows if share.memory_bytes is not None
    )
    yield from _write(CONTAINER_MEMORY, held)
