"""Writes the `gpuledger_…` metrics: readings, facts, events, containers and single processes.

`families` defines the metrics. Metrics of single processes are off by default, because each new
process adds series. Only a limited number of processes is shown: those that use most memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.ledger.allocated_parts import DeviceKey, device_of, devices_named_by
from gpuledger.ledger.health import throttle_reasons
from gpuledger.records import GpuProcess
from gpuledger_agent.exposition.device import ShownDevice, nvlink_link_bytes_totals
from gpuledger_agent.exposition.families import (
    ALLOCATION,
    CONTAINER_BUSY,
    CONTAINER_ENGINES,
    CONTAINER_MEMORY,
    FABRIC,
    FABRIC_CLUSTER,
    GPU_INFO,
    INCIDENTS,
    JOB_ALLOCATION,
    LABELS,
    NODE_INFO,
    NVLINK_BYTES,
    NVLINK_RATE,
    PID_POD,
    PROCESS_BUSY,
    PROCESS_LABELS,
    PROCESS_MEMORY,
    RACK,
    RECOVERY,
    THROTTLE_REASON,
    TICK_TIME,
    UP,
    XIDS,
    InfoFamily,
    Label,
    Labels,
    SampleLine,
    native_families,
    write_family,
    write_labels,
)
from gpuledger_agent.exposition.node_state import Snapshot
from gpuledger_agent.exposition.pod_lookup import NodeContainer, PodShare
from gpuledger_agent.settings import Profile

_MIB: Final = 1 << 20


def write_native(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the metrics of devices' readings that the profile includes."""
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
            # Text cannot be a gauge's value; it is a label of an info family.
            if (value := read(device)) is not None and not isinstance(value, str)
        )
        yield from write_family(family.name, family.kind, family.help, samples)


def device_labels(device: ShownDevice, node: str) -> list[tuple[str, str]]:
    """Return the labels of a device's readings.

    They are the same as those of the series that the remote-write sink sends.
    """
    reading, facts = device.reading, device.facts
    model = reading.model or (facts and facts.model) or ""
    values = (reading.uuid, str(reading.index), model)
    return [("node", node), *zip(LABELS, values, strict=True)]


def gpu_labels(device: ShownDevice) -> list[Label]:
    """Return the labels that identify a device: its UUID and index."""
    return [("gpu_uuid", device.reading.uuid), ("gpu_index", str(device.reading.index))]


def write_facts(now: Snapshot, profile: Profile) -> Iterator[str]:
    """Yield the lines of the metrics that describe the node, its devices and their allocations."""
    node = ("node", now.sample.node)
    inventory = next((device.node for device in now.devices if device.node), None)
    versions = [(name, getattr(inventory, name, None) or "") for name in NODE_INFO.label_names[1:]]
    yield from NODE_INFO.write([([node, ("boot_id", now.sample.boot_id), *versions], 1)])
    yield from TICK_TIME.write([([node], now.sample.time_ns / NS_PER_SECOND)])
    gpus: list[Labels] = []
    for device in now.devices:
        # Labels 3 to 6 come from the GPU's facts, which may be missing, the rest from the reading.
        facts = [(name, getattr(device.facts, name, None)) for name in GPU_INFO.label_names[3:7]]
        own = [(name, getattr(device.reading, name)) for name in GPU_INFO.label_names[7:]]
        known = [(name, "" if value is None else str(value)) for name, value in facts + own]
        gpus.append([*device_labels(device, now.sample.node), *known])
    yield from GPU_INFO.write((labels, 1) for labels in gpus)
    # An allocation names an instance's GPU; its series has the instance's UUID, to join with use.
    uuids: dict[DeviceKey, list[str]] = {}
    for device in now.devices:
        for key in devices_named_by(device.reading):
            uuids.setdefault(key, []).append(device.reading.uuid)
    # Several allocations may have the same labels, but each series must be written only once.
    allocations = dict.fromkeys(
        (
            node,
            ("gpu_uuid", uuid),
            ("device_id", allocation.device_id),
            ("resource", allocation.resource_name),
            *now.tick_containers.allocatee_of(allocation).labels,
            ("replica", allocation.replica or ""),
            ("claim", allocation.claim or ""),
            ("source", allocation.source or ""),
            ("share_ppm", "" if allocation.share_ppm is None else str(allocation.share_ppm)),
            ("count", str(allocation.count or 1)),
        )
        for allocation in now.sample.allocations
        for uuid in uuids.get(device_of(allocation), [allocation.gpu_uuid])
    )
    yield from ALLOCATION.write((labels, 1) for labels in allocations)
    jobs = dict.fromkeys(
        (
            node,
            ("gpu_uuid", uuid),
            (
                "gpu_instance",
                "" if allocation.gpu_instance is None else str(allocation.gpu_instance),
            ),
            ("job_id", allocation.job_id),
        )
        for allocation in now.sample.job_allocations or ()
        for uuid in uuids.get((allocation.gpu_uuid, allocation.gpu_instance), [allocation.gpu_uuid])
    )
    yield from JOB_ALLOCATION.write((labels, 1) for labels in jobs)
    for family, values_of in _BY_DEVICE:
        if profile in ("full", family.profile):
            yield from family.write(
                ([node, *gpu_labels(device), *further], value)
                for device in now.devices
                for further, value in values_of(device)
            )


class _ByDevice:
    """Functions for the families in `_BY_DEVICE`.

    Each function yields the additional labels and the value of each of a device's series.
    """

    @staticmethod
    def up(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        if device.reading.parent_uuid is None:
            yield [], int(not device.is_unresponsive and not device.is_lost)

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

    @staticmethod
    def fabric_cluster(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        facts = device.facts
        if facts and facts.fabric_cluster_uuid:
            clique = facts.fabric_clique_id
            place = (facts.fabric_cluster_uuid, "" if clique is None else str(clique))
            yield list(zip(FABRIC_CLUSTER.label_names[2:], place, strict=True)), 1

    @staticmethod
    def rack(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        facts = device.facts
        if facts and facts.chassis_serial_number:
            numbers = (facts.chassis_slot, facts.chassis_tray, facts.chassis_host, facts.module_id)
            written = ["" if number is None else str(number) for number in numbers]
            place = [facts.chassis_serial_number, *written]
            yield list(zip(RACK.label_names[2:], place, strict=True)), 1

    @staticmethod
    def throttle_reason(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        if device.throttling and device.throttling.reasons is not None:
            for reason, is_set in throttle_reasons(device.throttling.reasons):
                yield [("reason", reason)], int(is_set)

    @staticmethod
    def nvlink_rate(device: ShownDevice) -> Iterator[tuple[Labels, float]]:
        health = device.health
        sent = (health and health.nvlink_link_sent_bytes_per_second) or {}
        received = (health and health.nvlink_link_received_bytes_per_second) or {}
        for direction, rates in (("sent", sent), ("received", received)):
            for link, rate in rates.items():
                yield [("nvlink", link), ("direction", direction)], rate


_BY_DEVICE: Final[
    Sequence[tuple[InfoFamily, Callable[[ShownDevice], Iterator[tuple[Labels, float]]]]]
] = (
    (UP, _ByDevice.up),
    (RECOVERY, _ByDevice.recovery),
    (FABRIC, _ByDevice.fabric),
    (FABRIC_CLUSTER, _ByDevice.fabric_cluster),
    (RACK, _ByDevice.rack),
    (THROTTLE_REASON, _ByDevice.throttle_reason),
    (NVLINK_RATE, _ByDevice.nvlink_rate),
    (NVLINK_BYTES, _ByDevice.nvlink_bytes),
)


def write_events(now: Snapshot) -> Iterator[str]:
    """Yield the lines with the numbers of XIDs and incidents of each GPU.

    GPUs that do not answer are included.
    """
    xids: list[tuple[Labels, float]] = []
    incidents: list[tuple[Labels, float]] = []
    for uuid, (index, events) in now.events.items():
        gpu = [("node", now.sample.node), ("gpu_uuid", uuid), ("gpu_index", index)]
        xids += [([*gpu, ("xid", str(xid))], count) for xid, count in events.xids.items()]
        incidents += [
            ([*gpu, ("kind", kind), ("severity", severity)], count)
            for (kind, severity), count in events.incidents.items()
        ]
    yield from XIDS.write(xids)
    yield from INCIDENTS.write(incidents)


def write_containers(now: Snapshot) -> Iterator[str]:
    """Yield the lines with each container's or job's use of each device."""
    shares = now.tick_containers.shares()
    node = ("node", now.sample.node)
    rows: list[tuple[Labels, PodShare]] = [
        ([node, *gpu_labels(device), *share.user.labels], share)
        for device in now.devices
        for share in shares.get(device.reading.uuid, ())
    ]
    # A value that the driver does not report is missing, not 0.
    yield from CONTAINER_BUSY.write(
        (labels, share.busy_ratio) for labels, share in rows if share.busy_ratio is not None
    )
    yield from CONTAINER_MEMORY.write(
        (labels, share.memory_bytes) for labels, share in rows if share.memory_bytes is not None
    )
    yield from CONTAINER_ENGINES.write(
        ([*labels, ("engine", engine)], ratio)
        for labels, share in rows
        for engine, ratio in share.engine_busy_ratios.items()
    )


class _Entry(NamedTuple):
    process: GpuProcess
    name: str
    user: NodeContainer


def write_processes(now: Snapshot, *, max_processes: int) -> Iterator[str]:
    """Yield the lines of the metrics of single processes, for at most `max_processes` processes."""
    running = [process for process in now.sample.processes if not process.ended]
    if len(running) > max_processes:
        # Show the processes with most memory and, for equal memory, the lowest pids.
        running.sort(key=lambda process: (-(process.memory_used_bytes or 0), process.pid))
    tick_containers = now.tick_containers.containers
    entries = [
        _Entry(
            process,
            now.commands.get(process.pid, ""),
            NodeContainer() if process.container is None else tick_containers[process.container],
        )
        for process in running[:max_processes]
    ]
    yield from _write_pid_pod(entries, now)
    for family, field in (
        (PROCESS_BUSY, "sm_utilization_ratio"),
        (PROCESS_MEMORY, "memory_used_bytes"),
    ):
        # Keyed by labels: a process may be in two of the driver's lists, but must be one series.
        values: dict[Labels, float] = {}
        for process, name, user in entries:
            gpu = now.sample.gpus[process.gpu]
            own = (gpu.uuid, str(gpu.index), str(process.pid), name)
            # A value that the driver does not report is missing, not 0.
            if (value := getattr(process, field)) is not None:
                labels = (*zip(PROCESS_LABELS[: len(own)], own, strict=True), *user.labels)
                values[(("node", now.sample.node), *labels)] = value
        yield from family.write(values.items())


def _write_pid_pod(entries: Sequence[_Entry], now: Snapshot) -> Iterator[str]:
    """Yield the lines of `nvidia_pid_pod`: the GPU memory of each process in a pod.

    The memory is summed over GPUs, because the metric has no label for the GPU.
    """
    used: dict[Labels, int] = {}
    for process, name, user in entries:
        if user.pod and process.memory_used_bytes is not None:
            labels = (
                ("pid", str(process.pid)),
                ("process_name", name),
                ("pod_name", user.pod),
                ("namespace", user.namespace),
                ("node_name", now.sample.node),
                *user.pod_labels,
            )
            used[labels] = used.get(labels, 0) + process.memory_used_bytes
    return PID_POD.write((labels, memory_bytes // _MIB) for labels, memory_bytes in used.items())
