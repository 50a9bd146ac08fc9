"""Events as the join makes them, and the small helpers around a bus, for the sinks' tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import decoder_of, encode
from gpuledger.keys import key_in
from gpuledger.records import (
    BusyMethod,
    Category,
    ContainerRef,
    DeadLetter,
    EnergyMethod,
    Entry,
    EventAllocation,
    EventContainer,
    GpuBooks,
    GpuEvent,
    GpuReading,
    LateAdjustment,
    MemoryMethod,
    PodDescription,
    PodState,
)
from gpuledger.topics import partition_of_node
from tests.default_topics import DEAD_LETTERS, EVENTS, TOPICS
from tests.hanging import HANG_SECONDS

NODE = "node-a"
GPU = "GPU-11111111-2222-3333-4444-555555555555"
SECOND_NS = 1_000_000_000
KEY = key_in("default", NODE).encode()
START_NS = 1_790_000_000 * SECOND_NS
PARTITIONS = 2
T = TypeVar("T")


def reading(**changes: object) -> GpuReading:
    values: dict[str, Any] = {
        "uuid": GPU,
        "index": 0,
        "model": "NVIDIA H100 80GB HBM3",
        "utilization_ratio": 0.75,
        "memory_total_bytes": 80 * 2**30,
        "memory_used_bytes": 20 * 2**30,
        "power_milliwatts": 350_500,
        "temperature_celsius": 61,
        "sm_clock_hertz": 1_980_000_000,
    }
    values.update(changes)
    return GpuReading(**values)


CONTAINERS = [ContainerRef(container_id="c" * 64, pod_uid="uid-train")]
"""All containers of the tests: the table of each event."""


def container(*, pod_uid: str | None, container_id: str | None) -> int:
    """Return a container's position in the table of all events."""
    ref = ContainerRef(container_id=container_id, pod_uid=pod_uid)
    if ref not in CONTAINERS:
        CONTAINERS.append(ref)
    return CONTAINERS.index(ref)


def entry(
    category: Category = Category.POD,
    *,
    pod_uid: str | None = "uid-train",
    container_id: str | None = "c" * 64,
    **changes: object,
) -> Entry:
    values: dict[str, Any] = {
        "category": category,
        "busy_ns": SECOND_NS // 2,
        "memory_bytes": 2**30,
        "energy_millijoules": 100_000,
    }
    if category is Category.POD:
        values["container"] = container(pod_uid=pod_uid, container_id=container_id)
    values.update(changes)
    return Entry(**values)


def pod(**changes: object) -> PodDescription:
    values: dict[str, Any] = {
        "uid": "uid-train",
        "state": PodState.KNOWN,
        "namespace": "research",
        "name": "train-0",
        "owner_kind": "StatefulSet",
        "owner_name": "train",
        "labels": {"team": "vision", "app": "train"},
    }
    values.update(changes)
    return PodDescription(**values)


def holder(name: str = "notebook-0", **changes: object) -> PodDescription:
    """Return a pod to which a GPU is allocated, with the container `jupyter`."""
    values: dict[str, Any] = {"uid": f"uid-{name}", "name": name, "owner_name": None}
    return pod(**values | changes)


def settlement(
    busy_ns: int = SECOND_NS // 4, owner: Entry | None = None, **changes: object
) -> LateAdjustment:
    """Return a late adjustment for the three seconds before the first event, by default a pod's."""
    nothing: dict[str, Any] = {"memory_bytes": None, "energy_millijoules": None}
    owed = owner or entry(busy_ns=busy_ns, **nothing)
    values: dict[str, Any] = {
        "gpu": 0,
        "pid": 4711,
        "started_boottime_ns": SECOND_NS,
        "from_seq": 1,
        "from_time_ns": START_NS - 3 * SECOND_NS,
        "until_seq": 3,
        "until_time_ns": START_NS,
        "entries": [owed, entry(Category.UNATTRIBUTED, busy_ns=-busy_ns, **nothing)],
        "busy_method": BusyMethod.ACCOUNTING,
    }
    values.update(changes)
    return LateAdjustment(**values)


def books(of: GpuReading | None = None, *entries: Entry, **changes: object) -> GpuBooks:
    """Return a GPU's books; the default methods are those of a time-sliced GPU."""
    values: dict[str, Any] = {
        "busy_method": BusyMethod.PROCESS_UTILIZATION,
        "memory_method": MemoryMethod.MEASURED,
        "energy_method": EnergyMethod.COUNTER,
    }
    return GpuBooks(reading=of or reading(), entries=list(entries), **values | changes)


def event(
    tick: int = 0,
    *,
    node: str = NODE,
    entries: Sequence[Entry] | None = None,
    pods: Sequence[PodDescription] | None = None,
    of: GpuReading | None = None,
    allocated_to: Sequence[PodDescription] = (),
    **changes: object,
) -> GpuEvent:
    """Return an event; each of the allocatees `allocated_to` has one container."""
    booked = [entry(), entry(Category.IDLE)] if entries is None else list(entries)
    described = [pod()] if pods is None else list(pods)
    given: dict[str, Any] = {"gpus": [books(of, *booked)], "late_adjustments": None} | changes
    of_event = [*(given["gpus"] or ()), *(given["late_adjustments"] or ())]
    used = [one.container for each in of_event for one in each.entries if one.container is not None]
    # Only the containers that this event uses: the table of all events grows with each test.
    containers = _described(CONTAINERS[: max(used, default=-1) + 1], described)
    first = len(described)
    values: dict[str, Any] = {
        "cluster": "default",
        "node": node,
        "boot_id": "boot-1",
        "seq": 1000 * (tick + 1),
        "time_ns": START_NS + tick * SECOND_NS,
        "interval_ns": SECOND_NS,
        "gpus": given["gpus"],
        "pods": [*described, *allocated_to],
        "containers": containers,
        "allocations": [
            EventAllocation(pod=first + place, container="jupyter", resources=["nvidia.com/gpu"])
            for place in range(len(allocated_to))
        ],
    }
    return GpuEvent(**values | changes)


def _described(refs: list[ContainerRef], pods: list[PodDescription]) -> list[EventContainer]:
    """Return containers with their pods; one without a description gets a pending pod."""
    places = {one.uid: place for place, one in reversed(list(enumerate(pods)))}
    found = []
    for ref in refs:
        uid = "uid-train" if ref.pod_uid is None and "uid-train" in places else ref.pod_uid
        place = places.setdefault(uid, len(pods))
        if place == len(pods):
            pods.append(PodDescription(uid=uid, state=PodState.PENDING))
        is_named = pods[place].state is PodState.KNOWN and ref.container_id == "c" * 64
        name = "trainer" if is_named else None
        found.append(EventContainer(container_id=ref.container_id, pod=place, name=name))
    return found


BUS_TOPICS = [
    replace(topic, partitions=PARTITIONS) if topic is not DEAD_LETTERS else topic
    for topic in TOPICS
]
"""The topics of every bus of these tests, with few partitions."""


def bus() -> MemoryBus:
    return MemoryBus(BUS_TOPICS)


def place_of(node: str, topic: str = EVENTS.name) -> TopicPartition:
    return TopicPartition(topic, partition_of_node(key_in("default", node), partitions=PARTITIONS))


async def publish(to: MemoryBus, *events: GpuEvent | bytes, node: str = NODE) -> None:
    """Publish events in their node's partition; bytes go unchanged into that of `node`."""
    async with to.producer() as producer:
        for one in events:
            if isinstance(one, bytes):
                at, value, time_ns = place_of(node), one, START_NS
            else:
                at, value, time_ns = place_of(one.node), encode(one), one.time_ns
            key = key_in("default", node if isinstance(one, bytes) else one.node).encode()
            message = Message(key=key, value=value, timestamp_ms=time_ns // 1_000_000)
            await producer.publish(at.topic, at.partition, [message])


async def dead_letters(of: MemoryBus) -> list[DeadLetter]:
    return [
        decoder_of(DEAD_LETTERS.name, DeadLetter).decode(record.value)
        for record in of.kept(DEAD_LETTERS.name)
    ]


def committed(of: MemoryBus, group: str, at: TopicPartition) -> int | None:
    return of.committed(group, at)


async def set_back(on: MemoryBus, group: str, to: Mapping[TopicPartition, int]) -> None:
    """Set a group's offsets back, as after lost commits."""
    async with on.transactions("set back") as transactions:
        await transactions.commit({}, offsets=to, group=group)


async def eventually(holds: Callable[[], T], *, within_seconds: float = HANG_SECONDS) -> T:
    """Return the result of `holds()` as soon as it is true."""
    async with asyncio.timeout(within_seconds):
        while not (found := holds()):  # noqa: ASYNC110  # the condition has no event
            await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def running(work: Awaitable[T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` during the test and cancel it at the end; its failure fails the test."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class ManualClock:
    """A clock that the test moves by hand; sleeping moves it too, and is recorded."""

    def __init__(self, now_ns: int = START_NS) -> None:
        self.now_ns = now_ns
        self.set_by_ns = 0
        """By how much the wall clock was set."""
        self.slept: list[float] = []

    def advance(self, seconds: float) -> bool:
        """Move on; return true, so that it can precede a condition."""
        self.now_ns += round(seconds * SECOND_NS)
        return True

    def time_ns(self) -> int:
        return self.now_ns + self.set_by_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def boottime_ns(self) -> int:
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_ns += round(seconds * SECOND_NS)
        await asyncio.sleep(0)
