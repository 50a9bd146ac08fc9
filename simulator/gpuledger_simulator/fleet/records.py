"""The records of a planned fleet, as agents and podwatch would publish them.

A node's time is divided into stretches in which nothing changes, of at most an hour. Each becomes
one `NodeSample`, which the join books like a sample of a second: its interval is the stretch. So a
month has thousands of samples instead of millions, and the same sums per minute.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final, NamedTuple

from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    ContainerRef,
    ContainerRequest,
    DeviceAllocation,
    EnergyMethod,
    GpuFacts,
    GpuProcess,
    GpuReading,
    Incident,
    IncidentProcess,
    Inventory,
    MigInstance,
    NamespaceRecord,
    NodeRecord,
    NodeSample,
    PendingContainer,
    PendingPodRecord,
    PodContainer,
    PodRecord,
    ProcessKind,
    Severity,
)
from gpuledger.topics import Topic, Topics, partition_of_node
from gpuledger.xids import find_xid
from gpuledger_simulator import identities
from gpuledger_simulator.device import DeviceFacts
from gpuledger_simulator.fleet.plan import (
    MINUTES_A_DAY,
    MINUTES_AN_HOUR,
    FleetDevice,
    FleetNode,
    FleetPlan,
    FleetPod,
    FleetRequest,
    FleetXid,
    Loss,
    Slots,
)
from gpuledger_simulator.fleet.schema import Pool, Workload
from gpuledger_simulator.gpu_models import SimulatedInstance

_CONTAINER: Final = "main"
_UPTIME_SECONDS: Final = 18_000
"""Uptime of a node when the period begins."""
_BOOT_SECONDS: Final = 60
"""Uptime of a node when its agent is back after a restart."""
_GONE_NS: Final = 2 * NS_PER_SECOND
"""Time from the end of a pod to its deletion from the API server."""
_MINUTE_SECONDS: Final = 60
_GIB: Final = 1 << 30
_MILLICORES_PER_GPU: Final = 16_000
_HOST_BYTES_PER_GPU: Final = 128 * _GIB
_REQUESTED: Final = Fraction(3, 4)
"""The part of a node's CPU and memory for a GPU that a pod with this GPU requests."""
_LOST_XID: Final = 79


class FleetRecord(NamedTuple):
    """A record with its topic, partition and time."""

    time_ns: int
    topic: Topic
    partition: int
    message: Message


class FleetRecords:
    """Makes the records of a plan."""

    def __init__(self, plan: FleetPlan, *, topics: Topics) -> None:
        """Make the records of `plan` for these topics."""
        self._plan, self._topics = plan, topics
        self._pools = {pool.name: pool for pool in plan.fleet.pools}
        self._first_nodes = {node.pool.name: node for node in reversed(plan.nodes)}

    def of_day(self, day: int) -> list[FleetRecord]:
        """Return the records of a day of the plan, from 0, in order of time.

        A sample belongs to the day in which it ends; a sample that ends at midnight, to the day
        before.
        """
        first, end = day * MINUTES_A_DAY, (day + 1) * MINUTES_A_DAY
        found = list(self._of_cluster()) if not day else []
        found += self._of_queue(first, end)
        for node in self._plan.nodes:
            found += self._of_node(node, first, end)
        # Stable, so that records of the same time stay in the order in which they are made.
        return sorted(found, key=lambda each: each.time_ns)

    def _of_cluster(self) -> Iterator[FleetRecord]:
        plan = self._plan
        namespaces = {
            (self._pools[each.pool].cluster, each.namespace): each for each in plan.fleet.workloads
        }
        for (cluster, name), workload in namespaces.items():
            record = NamespaceRecord(
                cluster=cluster,
                uid=self._uid(f"namespace/{cluster}/{name}"),
                name=name,
                labels={"team": workload.team},
                created_time_ns=plan.begin_ns,
                resource_version="1",
            )
            yield self._record(self._topics.namespaces, key_in(cluster, name), record)
        for node in plan.nodes:
            yield self._node(node, 0)
            yield self._inventory(node, 0)

    def _of_queue(self, first: int, end: int) -> Iterator[FleetRecord]:
        for pod in self._plan.pods:
            if pod.waited:
                if first <= pod.created < end:
                    yield self._pending(pod)
                if first <= pod.start < end:
                    yield self._pending(pod, left=pod.start)
        yield from (self._pending(pod) for pod in self._plan.waiting if first <= pod.created < end)

    def _of_node(self, node: FleetNode, first: int, end: int) -> Iterator[FleetRecord]:
        pods = self._plan.pods_of[node]
        yield from (self._pod(pod) for pod in pods if first <= pod.start < end)
        yield from (self._pod(pod, is_deleted=True) for pod in pods if first <= pod.end < end)
        yield from self._failures(node, first, end)
        changes = (minute for cordon in node.cordons for minute in cordon)
        yield from (self._node(node, minute) for minute in changes if first <= minute < end)
        for begin, until in pairwise(self._borders(node, first, end)):
            if not node.is_down(begin):
                yield self._sample(node, begin, until)

    def _failures(self, node: FleetNode, first: int, end: int) -> Iterator[FleetRecord]:
        for loss in node.losses:
            if first <= loss.start < end:
                yield from self._loss(node, loss)
            if first <= loss.back < end:
                yield self._inventory(node, loss.back)
                yield self._recovery(node, loss)
        for xid in self._plan.xids:
            if xid.node is node and first <= xid.minute < end:
                yield self._xid(xid)

    def _borders(self, node: FleetNode, first: int, end: int) -> list[int]:
        """Return the minutes of a day at which something may change, with its start and end."""
        found = {*range(first, end, MINUTES_AN_HOUR), end}
        for pod in self._plan.pods_of[node]:
            found |= {pod.start, pod.end}
        for loss in node.losses:
            found |= {loss.start, loss.restart, loss.back}
        return sorted(minute for minute in found if first <= minute <= end)

    def _sample(self, node: FleetNode, begin: int, end: int) -> FleetRecord:
        plan = self._plan
        pods = [pod for pod in plan.pods_of[node] if pod.start <= begin < pod.end]
        rows = _Rows(node, begin, end)
        containers: list[ContainerRef] = []
        processes: list[GpuProcess] = []
        for position, pod in enumerate(pods):
            containers.append(ContainerRef(container_id=pod.container_id, pod_uid=pod.uid))
            ppm = plan.busy_ppm(pod, begin // MINUTES_AN_HOUR)
            for slots in pod.used_slots:
                device = node.devices[slots.device]
                if node.is_lost(device.gpu.index, begin):
                    continue
                memory_bytes = round(pod.workload.memory_gib * _GIB)
                rows.add(device, ppm=ppm, memory_bytes=memory_bytes)
                processes.append(
                    GpuProcess(
                        gpu=rows.position_of(device),
                        pid=_pid(pod, slots),
                        kind=ProcessKind.COMPUTE,
                        started_boottime_ns=self._boottime_ns(node, pod.start),
                        container=position,
                        memory_used_bytes=memory_bytes,
                        sm_utilization_ratio=ppm / 1_000_000,
                    )
                )
        sample = NodeSample(
            cluster=node.pool.cluster,
            node=node.name,
            boot_id=self._boot_id(node, begin),
            seq=self._boottime_ns(node, begin) // NS_PER_MS
            + (end - begin) * _MINUTE_SECONDS * 1000,
            time_ns=plan.time_ns(end),
            interval_ns=plan.time_ns(end) - plan.time_ns(begin),
            gpus=rows.readings(),
            containers=containers,
            processes=processes,
            allocations=[each for pod in pods for each in _allocations_of(pod)],
        )
        return self._record(
            self._topics.samples, node.key, sample, node=node, time_ns=sample.time_ns
        )

    def _pending(self, pod: FleetRequest, *, left: int | None = None) -> FleetRecord:
        workload = pod.workload
        created_ns = self._plan.time_ns(pod.created)
        time_ns = created_ns if left is None else self._plan.time_ns(left)
        pool = self._pools[workload.pool]
        resource = _resource(pool, workload.profile)
        record = PendingPodRecord(
            cluster=pool.cluster,
            uid=pod.uid,
            namespace=workload.namespace,
            name=pod.name,
            owner_kind=workload.kind,
            owner_name=workload.name,
            labels={"team": workload.team, **workload.labels},
            containers=[
                PendingContainer(
                    name=_CONTAINER,
                    requested=ContainerRequest(resources={resource: workload.units}),
                )
            ],
            **self._host_requests(workload),
            queue=workload.queue,
            reason="Unschedulable",
            message=f"0/{pool.nodes} nodes are available: {pool.nodes} Insufficient {resource}.",
            created_time_ns=created_ns,
            left_time_ns=None if left is None else time_ns,
            resource_version=str(4 * pod.number + (1 if left is None else 2)),
        )
        key = key_in(record.cluster, record.uid)
        return self._record(self._topics.pending_pods, key, record, time_ns=time_ns)

    def _host_requests(self, workload: Workload) -> dict[str, Any]:
        """Return the CPU and memory that a pod requests, by field."""
        devices = self._first_nodes[workload.pool].devices
        device = next(each for each in devices if each.profile == workload.profile)
        gpus = workload.units * device.size / device.slots
        return {
            "requested_cpu_millicores": int(gpus * _REQUESTED * _MILLICORES_PER_GPU),
            "requested_memory_bytes": int(gpus * _REQUESTED * _HOST_BYTES_PER_GPU),
        }

    def _pod(self, pod: FleetPod, *, is_deleted: bool = False) -> FleetRecord:
        workload, node, start_ns = pod.workload, pod.node, self._plan.time_ns(pod.start)
        end_ns = self._plan.time_ns(pod.end)
        record = PodRecord(
            cluster=node.pool.cluster,
            uid=pod.uid,
            namespace=workload.namespace,
            name=pod.name,
            node=node.name,
            owner_kind=workload.kind,
            owner_name=workload.name,
            labels={"team": workload.team, **workload.labels},
            containers=[
                PodContainer(
                    name=_CONTAINER,
                    requested=ContainerRequest(
                        resources={_resource(node.pool, workload.profile): workload.units}
                    ),
                    container_id=pod.container_id,
                    restarts=0,
                    started_time_ns=start_ns,
                    ended_time_ns=end_ns if is_deleted else None,
                )
            ],
            phase="Succeeded" if is_deleted else "Running",
            **self._host_requests(workload),
            created_time_ns=self._plan.time_ns(pod.created),
            scheduled_time_ns=start_ns,
            started_time_ns=start_ns,
            ended_time_ns=end_ns if is_deleted else None,
            deleted_time_ns=end_ns + _GONE_NS if is_deleted else None,
            resource_version=str(4 * pod.number + 3 + is_deleted),
        )
        time_ns = end_ns + _GONE_NS if is_deleted else start_ns
        key = key_in(record.cluster, record.uid)
        return self._record(self._topics.pods, key, record, node=node, time_ns=time_ns)

    def _node(self, node: FleetNode, minute: int) -> FleetRecord:
        pool = node.pool
        record = NodeRecord(
            cluster=pool.cluster,
            uid=self._uid(f"node/{node.key}"),
            name=node.name,
            pool=pool.name,
            instance_type=pool.instance_type,
            zone=pool.zone,
            region=pool.region,
            capacity_type=pool.capacity_type,
            allocatable_cpu_millicores=pool.gpus * _MILLICORES_PER_GPU,
            allocatable_memory_bytes=pool.gpus * _HOST_BYTES_PER_GPU,
            allocatable_resources=_allocatable(node),
            unschedulable=node.is_cordoned(minute),
            labels={"kubernetes.io/hostname": node.name},
            created_time_ns=self._plan.begin_ns,
            resource_version=str(minute + 1),
        )
        time_ns = self._plan.time_ns(minute)
        return self._record(self._topics.nodes, node.key, record, node=node, time_ns=time_ns)

    def _inventory(self, node: FleetNode, minute: int) -> FleetRecord:
        time_ns = self._plan.time_ns(minute)
        inventory = Inventory(
            cluster=node.pool.cluster,
            node=node.name,
            boot_id=self._boot_id(node, minute),
            time_ns=time_ns,
            gpus=[_facts_of(gpu) for gpu in node.gpus],
        )
        return self._record(self._topics.inventory, node.key, inventory, node=node, time_ns=time_ns)

    def _loss(self, node: FleetNode, loss: Loss) -> Iterator[FleetRecord]:
        xid = find_xid(_LOST_XID)
        yield self._incident(node, loss.gpu, loss.start, **_about_xid(_LOST_XID))
        yield self._incident(
            node,
            loss.gpu,
            loss.start,
            kind="gpu_lost",
            source="agent",
            severity=Severity.CRITICAL,
            message=f"it no longer answers: {xid.meaning}",
        )

    def _recovery(self, node: FleetNode, loss: Loss) -> FleetRecord:
        return self._incident(
            node,
            loss.gpu,
            loss.back,
            kind="gpu_recovered",
            source="agent",
            severity=Severity.INFO,
            message="it answers again",
        )

    def _xid(self, xid: FleetXid) -> FleetRecord:
        return self._incident(xid.node, xid.gpu, xid.minute, pods=xid.pods, **_about_xid(xid.xid))

    def _incident(
        self,
        node: FleetNode,
        gpu: int,
        minute: int,
        *,
        pods: Sequence[FleetPod] | None = None,
        **about: Any,  # noqa: ANN401  # fields of an incident
    ) -> FleetRecord:
        time_ns = self._plan.time_ns(minute)
        if pods is None:
            pods = [pod for pod in self._plan.pods_of[node] if pod.start <= minute < pod.end]
        slots_of_gpu = [
            (pod, slots)
            for pod in pods
            for slots in pod.slots
            if node.devices[slots.device].gpu.index == gpu
        ]
        incident = Incident(
            cluster=node.pool.cluster,
            node=node.name,
            boot_id=self._boot_id(node, minute),
            gpu_uuid=node.gpus[gpu].uuid,
            gpu_index=gpu,
            time_ns=time_ns,
            processes=[
                IncidentProcess(
                    pid=_pid(pod, slots), container_id=pod.container_id, pod_uid=pod.uid
                )
                for pod, slots in slots_of_gpu
                if slots in pod.used_slots
            ],
            allocations=[
                allocation
                for pod in pods
                for allocation in _allocations_of(pod)
                if allocation.gpu_uuid == node.gpus[gpu].uuid
            ]
            or None,
            **about,
        )
        return self._record(self._topics.incidents, node.key, incident, node=node, time_ns=time_ns)

    def _boot(self, node: FleetNode, minute: int) -> int:
        """Return the minute from which a node's current boot counts."""
        return max((loss.back for loss in node.losses if loss.back <= minute), default=0)

    def _boot_id(self, node: FleetNode, minute: int) -> str:
        return self._uid(f"boot/{node.key}/{self._boot(node, minute)}")

    def _boottime_ns(self, node: FleetNode, minute: int) -> int:
        """Return the time since the current boot of a node."""
        boot = self._boot(node, minute)
        uptime_seconds = _BOOT_SECONDS if boot else _UPTIME_SECONDS
        return (uptime_seconds + (minute - boot) * _MINUTE_SECONDS) * NS_PER_SECOND

    def _uid(self, what: str) -> str:
        return identities.run_uuid(self._plan.fleet.seed, self._plan.begin_ns, what)

    def _record(
        self,
        topic: Topic,
        key: str,
        value: object,
        *,
        node: FleetNode | None = None,
        time_ns: int | None = None,
    ) -> FleetRecord:
        time_ns = self._plan.begin_ns if time_ns is None else time_ns
        partition = 0 if node is None else partition_of_node(node.key, partitions=topic.partitions)
        message = Message(key.encode(), encode(value), time_ns // NS_PER_MS)
        return FleetRecord(time_ns, topic, partition, message)


class _Rows:
    """The rows of a sample: a row for each GPU, followed by its MIG instances."""

    def __init__(self, node: FleetNode, begin: int, end: int) -> None:
        self._node, self._seconds = node, (end - begin) * _MINUTE_SECONDS
        self._lost = {gpu.index for gpu in node.gpus if node.is_lost(gpu.index, begin)}
        self._ppm: dict[str, int] = {}
        self._memory: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        for gpu in node.gpus:
            self._positions[gpu.uuid] = len(self._positions)
            for instance in gpu.cuts[0].instances if gpu.cuts else ():
                self._positions[instance.uuid] = len(self._positions)

    def position_of(self, device: FleetDevice) -> int:
        """Return the position of a device's row."""
        return self._positions[_uuid(device)]

    def add(self, device: FleetDevice, *, ppm: int, memory_bytes: int) -> None:
        """Add the load of a process to the row of its device."""
        uuid = _uuid(device)
        self._ppm[uuid] = self._ppm.get(uuid, 0) + ppm
        self._memory[uuid] = self._memory.get(uuid, 0) + memory_bytes

    def readings(self) -> list[GpuReading]:
        """Return the rows."""
        found = []
        for gpu in self._node.gpus:
            instances = gpu.cuts[0].instances if gpu.cuts else ()
            found.append(self._of_gpu(gpu, instances))
            found += [self._of_instance(gpu, instance) for instance in instances]
        return found

    def _of_gpu(self, gpu: DeviceFacts, instances: Sequence[SimulatedInstance]) -> GpuReading:
        whole = gpu.mig_gpu.whole if gpu.mig_gpu else None
        identity: dict[str, Any] = {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "model": gpu.name,
            "mig_enabled": bool(instances) if whole else None,
            "compute_slices": whole.compute if whole else 1,
            "memory_slices": whole.memory if whole else 1,
        }
        if gpu.index in self._lost:
            return GpuReading(**identity, unresponsive=True)
        of_parts = [
            self._ppm.get(each.uuid, 0) * each.compute_slices // each.mig_gpu.compute
            for each in instances
        ]
        ppm = sum(of_parts) if instances else self._ppm.get(gpu.uuid, 0)
        idle, peak = round(gpu.idle_watts * 1000), round(gpu.max_watts * 1000)
        power = idle + (peak - idle) * ppm // 1_000_000
        memory_bytes = sum(
            self._memory.get(uuid, 0) for uuid in (gpu.uuid, *(each.uuid for each in instances))
        )
        return GpuReading(
            **identity,
            utilization_ratio=None if instances else ppm / 1_000_000,
            memory_total_bytes=gpu.memory_bytes,
            memory_used_bytes=memory_bytes,
            power_milliwatts=power,
            energy_millijoules=power * self._seconds,
            energy_method=EnergyMethod.COUNTER,
            idle_draw_milliwatts=idle,
        )

    def _of_instance(self, gpu: DeviceFacts, instance: SimulatedInstance) -> GpuReading:
        identity: dict[str, Any] = {
            "uuid": instance.uuid,
            "index": gpu.index,
            "model": gpu.name,
            "parent_uuid": gpu.uuid,
            "gpu_instance": instance.gpu_instance,
            "compute_instance": instance.compute_instance,
            "mig_profile": instance.profile,
            "compute_slices": instance.compute_slices,
            "memory_slices": instance.slices,
        }
        if gpu.index in self._lost:
            return GpuReading(**identity, unresponsive=True)
        return GpuReading(
            **identity,
            utilization_ratio=self._ppm.get(instance.uuid, 0) / 1_000_000,
            memory_total_bytes=instance.memory_bytes,
            memory_used_bytes=self._memory.get(instance.uuid, 0),
        )


def _uuid(device: FleetDevice) -> str:
    return device.instance.uuid if device.instance else device.gpu.uuid


def _pid(pod: FleetPod, slots: Slots) -> int:
    return 2_000 + 16 * pod.number + slots.device % 16


def _resource(pool: Pool, profile: str | None) -> str:
    """Return the resource that a pod requests."""
    if profile:
        return f"nvidia.com/mig-{profile}"
    return "aliyun.com/gpu-mem" if pool.sharing == "memory" else "nvidia.com/gpu"


def _allocatable(node: FleetNode) -> dict[str, int]:
    found: Counter[str] = Counter()
    for device in node.devices:
        found[_resource(node.pool, device.profile)] += device.slots
    return dict(found)


def _allocations_of(pod: FleetPod) -> Iterator[DeviceAllocation]:
    sharing, is_shared = pod.node.pool.sharing, pod.node.is_shared
    for slots in pod.slots:
        given = pod.node.devices[slots.device]
        uuid = _uuid(given)
        for number in slots.numbers:
            device_id = {
                "none": uuid,
                "time-slicing": f"{uuid}::{number}",
                "memory": f"{uuid}-_-{number}",
            }[sharing]
            yield DeviceAllocation(
                gpu_uuid=given.gpu.uuid,
                device_id=device_id,
                resource_name=_resource(pod.node.pool, pod.workload.profile),
                namespace=pod.workload.namespace,
                pod=pod.name,
                container=_CONTAINER,
                gpu_instance=given.instance.gpu_instance if given.instance else None,
                replica=str(number) if is_shared else None,
                device_replicas=given.slots if is_shared else None,
            )


def _about_xid(code: int) -> dict[str, Any]:
    known = find_xid(code)
    return {
        "kind": "xid",
        "source": "nvml",
        "severity": known.severity,
        "xid": code,
        "mnemonic": known.mnemonic,
        "category": known.category,
        "action": known.immediate,
        "message": known.meaning,
    }


def _facts_of(gpu: DeviceFacts) -> GpuFacts:
    return GpuFacts(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.name,
        architecture=gpu.model.architecture,
        memory_total_bytes=gpu.memory_bytes,
        power_limit_milliwatts=round(gpu.max_watts * 1000),
        mig_enabled=bool(gpu.cuts) if gpu.mig_gpu else None,
        instances=[
            MigInstance(
                uuid=each.uuid,
                gpu_instance=each.gpu_instance,
                compute_instance=each.compute_instance,
                profile=each.profile,
                gpu_slices=each.gpu_slices,
                compute_slices=each.compute_slices,
                placement_start=each.start,
                memory_total_bytes=each.memory_bytes,
            )
            for each in (gpu.cuts[0].instances if gpu.cuts else ())
        ],
        capabilities=[],
    )
