"""The series of an event, with their values.

`values_of` fills the families of `gpuledger.ledger.families` from one event. Whole numbers are
converted to base units only here, in the last step; all sums use whole numbers.

Most events repeat the one before: the same containers on the same GPUs. A reader of a node's
consecutive events keeps a `NodeGroups` for the node, so that the groups' labels are made once and
stay the same objects from tick to tick. The values are the same without a `NodeGroups`. This module
does no I/O.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from gpuledger.ledger.entries import (
    GPU_UNITS,
    NO_POD,
    PodIndex,
    PodOfEntry,
    allocated_job_of,
    digest_of_described,
    energy_method_of,
    gpu_units_of,
    job_of,
    shared,
)
from gpuledger.ledger.families import (
    ACCOUNT,
    ALLOCATION,
    BOOKED_OF_USERS,
    DEVICE,
    GPU_INFO,
    INSTANCE,
    METHOD,
    NAMESPACE_INFO,
    NODE,
    NODE_INFO,
    POD,
    POD_DELETED,
    POD_INFO,
    QUANTITIES_OF_USERS,
    REQUESTED,
    AllocationLabels,
    ContainerLabels,
    DeviceLabels,
    Family,
    InstanceLabels,
    NodeInfoLabels,
    PodInfoLabels,
)
from gpuledger.ledger.quantities import UNKNOWN, Amounts, apportion
from gpuledger.records import Category, Entry, GpuBooks, GpuEvent, GpuReading, PodState


class SeriesGroup(NamedTuple):
    """All series that share a metric family and a set of label values."""

    family: Family
    label_values: tuple[str, ...]


SeriesValues = tuple[float | None, ...]
"""The values of a group in a tick, in the order of its family's metrics; `None` if unknown."""


def absent_in(values: Sequence[float | None]) -> bytes:
    """Return a byte for each value: 1 if the value is absent, otherwise 0.

    The bytes are used to compare which values two ticks have.
    """
    return bytes([value is None for value in values])


MAX_GROUPS: Final = 16_384
"""Groups per sample: twice as many as 16 GPUs in 256 shares have. 40 bytes of an event can become
5 kB of labels, so a sample with this many comes to at most 85 MB."""
_Memory = tuple[str | None, int | str]
"""Identifies memory that compute instances may share: the GPU's UUID, and the number of the GPU
instance or the instance's UUID."""
_NODE_GROUP: Final = SeriesGroup(NODE, ())
_NOT_ALLOCATED: Final = AllocationLabels()
_QUANTITIES: Final = ("busy", "memory", "energy", "allocated")
"""The quantities whose methods are series, by their names there."""
_INFO: Final[SeriesValues] = (1.0,)
_UNAPPORTIONED: Final = (None,) * len(UNKNOWN)
_booked_amounts: Final[Callable[[Entry], Amounts]] = attrgetter(
    *(quantity.name for quantity in BOOKED_OF_USERS)
)
_owner_key: Final[Callable[[Entry], tuple[Any, ...]]] = attrgetter(
    "category", "container", "allocation", "job_id", "allocation_unknown"
)
_identity: Final[Callable[[GpuReading], tuple[Any, ...]]] = attrgetter(
    "uuid",
    "index",
    "model",
    "parent_uuid",
    "gpu_instance",
    "compute_instance",
    "mig_profile",
)
_BAD_IN_LABELS: Final = re.compile(r"[^a-zA-Z0-9_]")


def to_label(name: str) -> str:
    """Return a name in which `_` replaces the characters that Prometheus' labels cannot have."""
    return _BAD_IN_LABELS.sub("_", name)


def label_of(name: str, *, prefix: str = "label") -> str:
    """Return the Prometheus label for a Kubernetes label, converted as kube-state-metrics does."""
    return f"{prefix}_{to_label(name)}"


def refuse_equal_labels(setting: str, names: Iterable[str], external: Iterable[str] = ()) -> None:
    """Raise `ValueError` if a label name is empty, or if two names become the same series label."""
    taken = dict.fromkeys(external, "external_labels")
    for name in names:
        if not name:
            raise ValueError(f"{setting}: empty name; remove it")
        label = label_of(name)
        if label in taken:
            raise ValueError(
                f"{setting}: duplicate label {label} from {name} and {taken[label]}; remove one"
            )
        taken[label] = name


@dataclass(frozen=True, kw_only=True)
class SentLabels:
    """Names of the pods', namespaces' and nodes' labels that the info series include."""

    pods: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class _DeviceGroups:
    """The series groups of a device, which are the same while its entries have the same owners."""

    identity: tuple[Any, ...]
    """Key of the groups: the reading's identity, and the entries' owners."""
    device: SeriesGroup
    info: SeriesGroup
    users: list[SeriesGroup]
    """For each entry, the group in which its use counts."""
    allocatees: list[SeriesGroup | None]
    """For each entry, the group in which its allocation counts, if the entry is idle."""
    are_distinct: bool
    """Whether no two entries have the same group in `users`."""
    methods: tuple[Any, ...]
    """The methods of its last tick: for busy time, memory and energy."""
    of_methods: dict[SeriesGroup, SeriesValues]
    """The series of these methods."""


@dataclass(slots=True)
class NodeGroups:
    """The series groups of a node's last event, kept to be reused for the next event.

    Each object belongs to one `EventSeries` and one node.
    """

    described: bytes | None = None
    """Digest of the event's descriptions of pods, containers, allocations, namespaces and node."""
    descriptions: dict[SeriesGroup, SeriesValues] = field(default_factory=dict)
    """The series that depend only on these descriptions."""
    devices: dict[str, _DeviceGroups] = field(default_factory=dict)


class EventSeries:
    """Makes the series of events, with configurable labels on the info series."""

    def __init__(self, sent: SentLabels | None = None) -> None:
        self._sent = sent = sent or SentLabels()
        self._pod_info = _with_labels(POD_INFO, sent.pods)
        self._namespace_info = _with_labels(NAMESPACE_INFO, sent.namespaces)
        self._node_info = _with_labels(NODE_INFO, sent.nodes)

    def values_of(
        self,
        event: GpuEvent,
        known: NodeGroups | None = None,
        *,
        described: bytes | None = None,
    ) -> dict[SeriesGroup, SeriesValues]:
        """Return the values of each group, in the order of its family's metrics.

        Values are `None` if unknown. `known` belongs to the node's last event and is updated to
        this one; `described` is the event's `digest_of_described`, if the caller has it. Entries
        with the same labels, for example of two containers whose names are not known yet, are added
        up, because a series has one sample per tick. Raises `ValueError` if an entry refers to
        something that the event does not list, or if there are more than `MAX_GROUPS`.
        """
        if known is None:
            known, described = NodeGroups(), b""
        else:
            described = described or digest_of_described(event)
        pods = PodIndex(event)
        if described != known.described:
            # The descriptions have changed, so positions in entries refer to other things now.
            known.described, known.devices = None, {}
            known.descriptions = self._descriptions(event)
            known.described = described
        values: dict[SeriesGroup, SeriesValues] = {
            _NODE_GROUP: (event.time_ns / 10**9, _seconds(event.gap_ns)),
            **known.descriptions,
        }
        memories: set[_Memory] = set()
        interval_ns = event.interval_ns
        divisors = [quantity.divisor(interval_ns) for quantity in QUANTITIES_OF_USERS]
        before, known.devices = known.devices, {}
        for books in event.gpus:
            device = before.get(books.reading.uuid)
            identity = (_identity(books.reading), list(map(_owner_key, books.entries)))
            if device is None or device.identity != identity:
                device = _device_groups(books, identity, pods)
            known.devices[books.reading.uuid] = device
            values[device.device] = _of_row(books, memories)
            values[device.info] = _INFO
            values |= _methods_of(books, device)
            # An interval of length 0 has no averages, but the device's readings are valid.
            if interval_ns > 0:
                _add_users(values, books, device, interval_ns, divisors)
                values |= _of_allocatees(books, device, interval_ns)
            # Checked after each device, so that an event cannot grow far beyond the limit.
            _refuse_too_many(values)
        return values

    def _descriptions(self, event: GpuEvent) -> dict[SeriesGroup, SeriesValues]:
        """Return the info series of pods, namespaces and the node, and the series of requests."""
        found: dict[SeriesGroup, SeriesValues] = {}
        for labels in _pod_labels(event, self._sent.pods):
            found[SeriesGroup(self._pod_info, labels)] = _INFO
        for pod in event.pods:
            if pod.deleted_time_ns is not None and pod.uid is not None:
                labels = (shared(pod.namespace or ""), pod.name or "", pod.uid)
                found[SeriesGroup(POD_DELETED, labels)] = (pod.deleted_time_ns / 10**9,)
        if self._sent.namespaces:
            for namespace in event.namespaces or ():
                chosen = _chosen(namespace.labels, self._sent.namespaces)
                found[SeriesGroup(self._namespace_info, (namespace.name, *chosen))] = _INFO
        if (node := event.node_description) is not None:
            described = NodeInfoLabels(
                node_pool=node.pool or "",
                node_instance_type=node.instance_type or "",
                node_zone=node.zone or "",
                node_region=node.region or "",
                node_capacity_type=node.capacity_type or "",
            )
            labels = (*described, *_chosen(node.labels, self._sent.nodes))
            found[SeriesGroup(self._node_info, labels)] = _INFO
        _refuse_too_many(found)
        for labels, amount in _requests(event):
            found[SeriesGroup(REQUESTED, labels)] = (float(amount),)
            _refuse_too_many(found)
        return found


def _refuse_too_many(values: dict[SeriesGroup, SeriesValues]) -> None:
    if len(values) > MAX_GROUPS:
        raise ValueError(f"gpus: too many series groups: more than {MAX_GROUPS}")


def _with_labels(family: Family, names: Iterable[str]) -> Family:
    chosen = tuple(map(label_of, names))
    return replace(family, labels=(*family.labels, *chosen)) if chosen else family


def _chosen(labels: dict[str, str] | None, names: Iterable[str]) -> Iterator[str]:
    return ((labels or {}).get(name, "") for name in names)


def _pod_labels(event: GpuEvent, chosen: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the labels of each pod's info series, once per UID, because queries join on it."""
    seen = set()
    for pod in event.pods:
        # Another node's pod is described in that node's events.
        if pod.uid is None or pod.uid in seen or pod.state is PodState.FOREIGN:
            continue
        seen.add(pod.uid)
        described = PodInfoLabels(
            namespace=shared(pod.namespace or ""),
            pod=pod.name or "",
            pod_uid=pod.uid,
            owner_kind=shared(pod.owner_kind or ""),
            owner_name=pod.owner_name or "",
        )
        yield (*described, *_chosen(pod.labels, chosen))


def _requests(event: GpuEvent) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the labels and amount of each resource that a container requests."""
    for pod in event.pods:
        if pod.requested is None or pod.state is PodState.FOREIGN:
            continue
        for container, request in pod.requested.items():
            for resource, amount in request.resources.items():
                labels = ContainerLabels(
                    namespace=shared(pod.namespace or ""),
                    pod=pod.name or "",
                    pod_uid=pod.uid or "",
                    container=shared(container),
                )
                yield (*labels, resource), amount


def _device_groups(books: GpuBooks, identity: tuple[Any, ...], pods: PodIndex) -> _DeviceGroups:
    """Return the series groups of a device.

    `identity` is the reading's identity and the entries' owners. Raises `ValueError` if an entry
    refers to something that the event does not list.
    """
    reading = books.reading
    gpu = DeviceLabels(
        gpu_uuid=reading.uuid, gpu_index=str(reading.index), model=shared(reading.model or "")
    )
    instance = InstanceLabels(
        parent_uuid=reading.parent_uuid or "",
        gpu_instance=_number_text(reading.gpu_instance),
        compute_instance=_number_text(reading.compute_instance),
        mig_profile=reading.mig_profile or "",
    )
    is_instance = reading.parent_uuid is not None
    users, allocatees = list[SeriesGroup](), list[SeriesGroup | None]()
    for entry in books.entries:
        allocatee = _allocation_labels(entry, pods)
        is_idle = entry.category is Category.IDLE
        allocatees.append(SeriesGroup(ALLOCATION, (reading.uuid, *allocatee)) if is_idle else None)
        if entry.category is Category.POD:
            user = SeriesGroup(POD, (reading.uuid, *_container_labels(pods.user_of(entry))))
        else:
            category = entry.category.value, job_of(entry) or ""
            user = SeriesGroup(ACCOUNT, (reading.uuid, *category, *allocatee))
        users.append(user)
    of_reading, owners = identity
    return _DeviceGroups(
        identity=(of_reading, [*map(shared, owners)]),
        device=SeriesGroup(INSTANCE, (*gpu, *instance))
        if is_instance
        else SeriesGroup(DEVICE, gpu),
        info=SeriesGroup(GPU_INFO, (*gpu, *instance)),
        users=users,
        allocatees=allocatees,
        are_distinct=len(set(users)) == len(users),
        methods=(),
        of_methods={},
    )


def _number_text(number: int | None) -> str:
    return "" if number is None else str(number)


def _allocation_labels(entry: Entry, pods: PodIndex) -> AllocationLabels:
    allocatee = pods.allocatee_of(entry)
    if allocatee is NO_POD:
        job = allocated_job_of(entry)
        return _NOT_ALLOCATED if job is None else AllocationLabels(allocated_job_id=job)
    pod = allocatee.described
    return AllocationLabels(
        allocated_namespace=shared(pod.namespace or ""),
        allocated_pod=pod.name or "",
        allocated_pod_uid="" if pod.state is PodState.FOREIGN else pod.uid or "",
        allocated_container=shared(allocatee.container or ""),
        allocated_pod_state="" if pod.state is PodState.KNOWN else str(pod.state),
    )


def _container_labels(user: PodOfEntry) -> ContainerLabels:
    pod = user.described
    return ContainerLabels(
        namespace=shared(pod.namespace or ""),
        pod=pod.name or "",
        pod_uid=pod.uid or "",
        container=shared(user.container or ""),
    )


def _methods_of(books: GpuBooks, device: _DeviceGroups) -> dict[SeriesGroup, SeriesValues]:
    """Return the info series with the methods by which the quantities were determined."""
    methods = (
        books.busy_method,
        books.memory_method,
        energy_method_of(books),
        books.allocated_method,
    )
    if device.methods != methods:
        device.methods, uuid = methods, books.reading.uuid
        device.of_methods = {
            SeriesGroup(METHOD, (uuid, quantity, method.value)): _INFO
            for quantity, method in zip(_QUANTITIES, methods, strict=True)
            if method is not None
        }
    return device.of_methods


def _add_users(
    values: dict[SeriesGroup, SeriesValues],
    books: GpuBooks,
    device: _DeviceGroups,
    interval_ns: int,
    divisors: Sequence[float],
) -> None:
    """Add each user's averages over the tick to `values`, by the user's group."""
    booked = zip(device.users, books.entries, apportion(books, interval_ns), strict=True)
    if not device.are_distinct:
        summed: dict[SeriesGroup, Amounts] = {}
        for group, entry, apportioned in booked:
            amounts = (*_booked_amounts(entry), *apportioned)
            before = summed.get(group)
            summed[group] = amounts if before is None else _sum(before, amounts)
        for group, amounts in summed.items():
            values[group] = (*_averages(amounts, divisors),)
        return
    for group, entry, apportioned in booked:
        # Usually the chip's counters are not read, and nothing is apportioned.
        if apportioned is UNKNOWN:
            values[group] = (*_averages(_booked_amounts(entry), divisors), *_UNAPPORTIONED)
        else:
            amounts = (*_booked_amounts(entry), *apportioned)
            values[group] = (*_averages(amounts, divisors),)


def _averages(amounts: Amounts, divisors: Sequence[float]) -> list[float | None]:
    # Built from a list for each entry of each tick: a tuple from a generator takes a third longer.
    return [
        None if amount is None else amount / divisor
        for amount, divisor in zip(amounts, divisors, strict=False)
    ]


def _sum(left: Amounts, right: Amounts) -> Amounts:
    pairs = zip(left, right, strict=True)
    return tuple([b if a is None else a if b is None else a + b for a, b in pairs])


def _of_allocatees(
    books: GpuBooks, device: _DeviceGroups, interval_ns: int
) -> dict[SeriesGroup, SeriesValues]:
    """Return the metrics of the device's allocations, by container or job."""
    allocated: dict[SeriesGroup, int] = {}
    for entry, group in zip(books.entries, device.allocatees, strict=True):
        # Only idle entries have allocated time.
        if group is not None and entry.allocated_ns is not None:
            allocated[group] = allocated.get(group, 0) + entry.allocated_ns
    units = gpu_units_of(books)
    return {
        group: (
            allocated_ns / interval_ns,
            None if units is None else allocated_ns * units / (GPU_UNITS * interval_ns),
        )
        for group, allocated_ns in allocated.items()
    }


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 10**9


def _of_row(books: GpuBooks, memories: set[_Memory]) -> SeriesValues:
    """Return the readings of a GPU or MIG instance, in the order of its family's metrics."""
    reading = books.reading
    if reading.parent_uuid is not None:
        return _of_instance(books, memories)
    power, energy = reading.power_milliwatts, reading.energy_total_millijoules
    # By position, in the order of `DEVICE.metrics`: naming each value would add a twentieth to the
    # time for making an event's series.
    return (
        0.0 if reading.unresponsive else 1.0,
        reading.utilization_ratio,
        reading.memory_utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
        None if power is None else power / 1000,
        None if energy is None else energy / 1000,
        reading.temperature_celsius,
        reading.sm_clock_hertz,
        reading.memory_clock_hertz,
        _seconds(books.gap_ns),
    )


def _of_instance(books: GpuBooks, memories: set[_Memory]) -> SeriesValues:
    """Return the readings of a MIG instance, in the order of its family's metrics.

    Compute instances may share memory. The memory is included only if it is not in `memories`, and
    then added to `memories`, so that it counts once.
    """
    reading, gap_seconds = books.reading, _seconds(books.gap_ns)
    instance = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
    memory = (reading.parent_uuid, instance)
    # Compute instances of one GPU instance share its memory. It is reported for only one of them,
    # because a sum would count it several times.
    if memory in memories or reading.memory_total_bytes is None:
        return reading.utilization_ratio, None, None, None, gap_seconds
    memories.add(memory)
    return (
        reading.utilization_ratio,
        reading.memory_used_bytes,
        reading.memory_total_bytes,
        reading.memory_reserved_bytes,
        gap_seconds,
    )


_DEFAULT: Final = EventSeries()


def values_of(event: GpuEvent) -> dict[SeriesGroup, SeriesValues]:
    """Return the values of an event's series as `EventSeries.values_of`, without extra labels."""
    return _DEFAULT.values_of(event)
