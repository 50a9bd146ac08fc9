"""The present shares and use of GPUs in the newest event of each node, as tables.

Pure: returns lines of text and objects for JSON. The tables are those of `kubectl inspect cgpu`,
with the measured use next to each allocation.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import show_node
from gpuledger.ledger.entries import UNKNOWN_ALLOCATEE, PodIndex, PodOfEntry
from gpuledger.records import Category, Entry, GpuBooks, GpuEvent
from gpuledger.texts import counted

_GIB: Final = 2**30
_GAP: Final = "  "
_UNNAMED: Final = "pod "
_OLD_NS: Final = 10 * NS_PER_SECOND


@dataclass
class UserOfGpu:
    """A pod, a job or the host on one device."""

    allocated_bytes: int = 0
    """The memory in its share, used or not."""
    used_bytes: int = 0
    """Its memory in use."""
    allocated_ns: int = 0
    """Its share of the interval."""
    busy_ns: int = 0
    """Time in which its kernels ran."""


@dataclass
class Device:
    """A GPU that is not partitioned, or a MIG instance."""

    index: int
    """Index of the physical GPU."""
    uuid: str
    profile: str | None
    total_bytes: int | None
    """Size of the memory; absent while the device does not respond."""
    interval_ns: int
    users: dict[str, UserOfGpu] = field(default_factory=lambda: defaultdict(UserOfGpu))
    """By name."""

    @property
    def name(self) -> str:
        """The name for a heading."""
        return f"GPU{self.index}/{self.profile}" if self.profile else f"GPU{self.index}"

    @property
    def allocated_bytes(self) -> int:
        """Memory that is allocated to anyone."""
        return sum(user.allocated_bytes for user in self.users.values())

    @property
    def used_bytes(self) -> int:
        """Memory that anyone uses."""
        return sum(user.used_bytes for user in self.users.values())


@dataclass(frozen=True, kw_only=True)
class Node:
    """The devices of a node at the end of its newest sample."""

    cluster: str
    node: str
    time_ns: int
    devices: Sequence[Device]

    @property
    def name(self) -> str:
        """The name for people."""
        return show_node(self.cluster, self.node)


def node_of(event: GpuEvent) -> Node:
    """Return a node's devices, from its event."""
    pods = PodIndex(event)
    return Node(
        cluster=event.cluster,
        node=event.node,
        time_ns=event.time_ns,
        devices=[
            _device(books, pods, event.interval_ns)
            for books in event.gpus
            if not books.reading.mig_enabled or books.reading.parent_uuid is not None
        ],
    )


def _device(books: GpuBooks, pods: PodIndex, interval_ns: int) -> Device:
    reading = books.reading
    total = reading.memory_total_bytes
    device = Device(reading.index, reading.uuid, reading.mig_profile, total, interval_ns)
    for entry in books.entries:
        if entry.category is Category.IDLE:
            if (name := _allocatee(entry, pods.allocatee_of(entry))) is not None:
                user, part = device.users[name], entry.allocated_ns or 0
                user.allocated_ns += part
                user.allocated_bytes += (total or 0) * part // interval_ns
        elif entry.memory_bytes or entry.busy_ns:
            user = device.users[_user(entry, pods.user_of(entry))]
            user.used_bytes += entry.memory_bytes or 0
            user.busy_ns += entry.busy_ns or 0
    return device


def _allocatee(entry: Entry, pod: PodOfEntry) -> str | None:
    if pod is UNKNOWN_ALLOCATEE:
        return "__unknown__"
    if pod.pod is None:
        return f"job {entry.job_id}" if entry.job_id else None
    return _pod(pod)


def _user(entry: Entry, pod: PodOfEntry) -> str:
    if entry.category is Category.POD:
        return _pod(pod)
    return f"job {entry.job_id}" if entry.category is Category.JOB else f"__{entry.category}__"


def _pod(pod: PodOfEntry) -> str:
    described = pod.described
    if described.name is None:
        return f"{_UNNAMED}{described.uid or pod.container_id or ''}".strip()
    return f"{described.namespace}/{described.name}"


def summary_lines(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a row for each node with the memory of each GPU, and the totals of all nodes."""
    indexes = sorted({device.index for node in nodes for device in node.devices})
    heads = [f"GPU{index}(Allocated/Used/Total)" for index in indexes]
    rows = [["NODE", *heads, "GPU Memory(GiB)"]]
    for node in nodes:
        by_index: dict[int, list[Device]] = defaultdict(list)
        for device in node.devices:
            by_index[device.index].append(device)
        cells = [_amounts(by_index[index]) if index in by_index else "-" for index in indexes]
        rows.append([node.name, *cells, _amounts(node.devices)])
    lines = list(_aligned(rows))
    devices = [device for node in nodes for device in node.devices]
    yield from lines
    yield "-" * max(map(len, lines))
    yield "Allocated/Used/Total GPU memory of all nodes (GiB):"
    yield f"{_amounts(devices)} ({_percent(_allocated(devices), _total(devices))} allocated)"


def detail_lines(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a block for each node, with a row for each pod."""
    for number, node in enumerate(nodes):
        if number:
            yield ""
        yield f"NODE: {node.name}"
        yield ""
        names = sorted({name for device in node.devices for name in device.users})
        heads = [f"{device.name}(Allocated/Used, Busy)" for device in node.devices]
        rows = [["POD", *heads]]
        rows += [[name, *(_use(device, name) for device in node.devices)] for name in names]
        yield from _aligned(rows)
        yield ""
        total = _total(node.devices)
        for title, amount in (
            ("Allocated", _allocated(node.devices)),
            ("Used", sum(device.used_bytes for device in node.devices)),
        ):
            yield f"{title:9} : {_gib(amount)} GiB ({_percent(amount, total)})"
        yield f"{'Total':9} : {_gib(total)} GiB"


def unnamed_hints(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line about pods without a name, whose allocation and use may be in two rows."""
    names = {name for node in nodes for device in node.devices for name in device.users}
    unnamed = sum(name.startswith(_UNNAMED) for name in names)
    if unnamed:
        yield (
            f"{counted(unnamed, 'pod')} without a name; the allocation of a pod may be in another"
            " row, so check podwatch with `gpuledger doctor`"
        )


def old_hints(nodes: Sequence[Node], *, now_ns: int) -> Iterator[str]:
    """Yield a line about each node whose newest sample is old."""
    for node in nodes:
        interval_ns = max((device.interval_ns for device in node.devices), default=0)
        age_ns = now_ns - node.time_ns
        if age_ns > _OLD_NS + interval_ns:
            yield (
                f"{node.name}: the newest sample is {age_ns // NS_PER_SECOND} s old; check its"
                " agent, and the join"
            )


def as_objects(nodes: Sequence[Node]) -> list[Mapping[str, Any]]:
    """Return the same as objects for JSON, in bytes and ratios."""
    return [
        {
            "cluster": node.cluster,
            "node": node.node,
            "time_ns": node.time_ns,
            "devices": [
                {
                    "gpu_index": device.index,
                    "gpu_uuid": device.uuid,
                    "mig_profile": device.profile,
                    "memory_total_bytes": device.total_bytes,
                    "users": [
                        {
                            "name": name,
                            "allocated_ratio": user.allocated_ns / device.interval_ns,
                            "memory_allocated_bytes": user.allocated_bytes,
                            "memory_used_bytes": user.used_bytes,
                            "busy_ratio": user.busy_ns / device.interval_ns,
                        }
                        for name, user in sorted(device.users.items())
                    ],
                }
                for device in node.devices
            ],
        }
        for node in nodes
    ]


def _use(device: Device, name: str) -> str:
    user = device.users.get(name)
    if user is None:
        return "-"
    busy = _percent(user.busy_ns, device.interval_ns)
    return f"{_gib(user.allocated_bytes)}/{_gib(user.used_bytes)}, {busy}"


def _amounts(devices: Sequence[Device]) -> str:
    used = sum(device.used_bytes for device in devices)
    return "/".join(map(_gib, (_allocated(devices), used, _total(devices))))


def _allocated(devices: Iterable[Device]) -> int:
    return sum(device.allocated_bytes for device in devices)


def _total(devices: Iterable[Device]) -> int:
    return sum(device.total_bytes or 0 for device in devices)


def _gib(amount: int) -> str:
    return f"{amount / _GIB:.1f}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield _GAP.join(cells).rstrip()
