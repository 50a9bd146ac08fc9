"""Random topics: ticks of nodes that boot, pause and repeat themselves.

The order within a partition is fixed, as on Kafka; the order across topics is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace
from typing_extensions import override

from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of, encode
from gpuledger.keys import key_in, node_key
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuProcess,
    NodeSample,
    PodRecord,
    ProcessExit,
)
from tests.default_topics import PODS, SAMPLES
from tests.unit.enricher.join.ticks import (
    SECOND_NS,
    pod,
    process,
    process_end,
    reading,
    sample,
)

T = TypeVar("T")
BEGIN_NS: Final = 1_795_000_000 * SECOND_NS
PARTITIONS: Final = (0, 1)
NODES: Final = (("node-a", 0), ("node-b", 0), ("node-c", 1))
PODS_A_NODE: Final = 3
GPUS: Final = 2

ratios = st.sampled_from([None, 0.0, 0.03, 0.1, 0.25, 0.5, 0.97, 1.0])
sizes = st.sampled_from([None, 0, 2**20, 3 * 2**30])


@dataclass(frozen=True, repr=False)
class Topics:
    """The records of each partition, in the order of their offsets."""

    samples: dict[int, list[Record]]
    pods: dict[int, list[Record]]

    @override
    def __repr__(self) -> str:
        """Name the ticks briefly: hypothesis shows this, and refuses to show everything."""
        ticks = {place: [_named(one) for one in each] for place, each in self.samples.items()}
        pods = {place: len(each) for place, each in self.pods.items()}
        return f"Topics(ticks={ticks}, pods={pods})"


def uid_of(node: str, number: int) -> str:
    """Return the UID of a node's pod."""
    return f"00000000-0000-4000-8000-{node.encode().hex()[-8:]}{number:04d}"


def container_of(node: str, number: int) -> str:
    """Return the id of its container."""
    return f"{node.encode().hex()}{number}".ljust(64, "0")


@st.composite
def ticks(
    draw: st.DrawFn, node: str, boot: str, *, seq: int, time_ns: int, passed_ns: int
) -> NodeSample:
    """Draw one tick: the processes on the GPUs, and the readings of both.

    It covers at most the time that has passed since the previous tick.
    """
    interval_ns = draw(st.sampled_from([SECOND_NS, 999_000_001, 250_000_000]))
    numbers = draw(st.lists(st.integers(0, PODS_A_NODE - 1), unique=True, max_size=PODS_A_NODE))
    shows = [draw(st.sampled_from(["both", "uid", "container"])) for _ in numbers]
    return sample(
        node=node,
        boot_id=boot,
        seq=seq,
        time_ns=time_ns,
        interval_ns=min(interval_ns, passed_ns),
        gpus=[
            reading(
                uuid=f"GPU-{node}-{index}",
                index=index,
                utilization_ratio=draw(ratios),
                energy_millijoules=draw(st.sampled_from([None, 0, 61_500, 699_125])),
            )
            for index in range(GPUS)
        ],
        containers=[
            ContainerRef(
                pod_uid=uid_of(node, number) if shown != "container" else None,
                container_id=container_of(node, number) if shown != "uid" else None,
            )
            for number, shown in zip(numbers, shows, strict=True)
        ],
        processes=draw(st.lists(processes(len(numbers)), max_size=4)),
        allocations=draw(st.lists(allocations(node), max_size=2)),
        ended_processes=draw(st.none() | st.lists(ends(len(numbers)), max_size=2)),
    )


@st.composite
def processes(draw: st.DrawFn, containers: int) -> GpuProcess:
    """Draw a process of a container or of the host."""
    return process(
        gpu=draw(st.integers(0, GPUS - 1)),
        pid=draw(st.integers(1, 99)),
        container=draw(st.one_of(st.none(), st.integers(0, containers - 1)))
        if containers
        else None,
        sm_utilization_ratio=draw(ratios),
        memory_used_bytes=draw(sizes),
        ended=draw(st.sampled_from([None, True])),
    )


@st.composite
def ends(draw: st.DrawFn, containers: int) -> ProcessExit:
    """Draw an ended process of a container or of the host."""
    return process_end(
        gpu=draw(st.integers(0, GPUS - 1)),
        pid=draw(st.integers(1, 99)),
        container=draw(st.one_of(st.none(), st.integers(0, containers - 1)))
        if containers
        else None,
        busy_ns=draw(st.integers(0, 2 * SECOND_NS)),
        reserved_busy_ns=draw(st.integers(0, SECOND_NS)),
    )


@st.composite
def allocations(draw: st.DrawFn, node: str) -> DeviceAllocation:
    """Draw the kubelet's allocations to a pod of the node."""
    gpu = f"GPU-{node}-{draw(st.integers(0, GPUS - 1))}"
    return DeviceAllocation(
        gpu_uuid=gpu,
        device_id=gpu,
        resource_name="nvidia.com/gpu",
        namespace="research",
        pod=f"train-{draw(st.integers(0, PODS_A_NODE - 1))}",
        container="main",
    )


@st.composite
def node_ticks(draw: st.DrawFn, node: str) -> list[NodeSample]:
    """Draw a node's ticks in order: a boot or two, gaps, and repeated ticks."""
    made: list[NodeSample] = []
    time_ns = BEGIN_NS
    for boot in ("first-boot", "second-boot")[: draw(st.integers(1, 2))]:
        seq, in_boot = draw(st.integers(0, 9_000)), []
        for _ in range(draw(st.integers(0, 4))):
            length_ms = draw(st.sampled_from([250, 1_000, 1_001, 45_000]))
            passed_ns = length_ms * 10**6
            seq, time_ns = seq + length_ms, time_ns + passed_ns
            tick = ticks(node, boot, seq=seq, time_ns=time_ns, passed_ns=passed_ns)
            in_boot.append(draw(tick))
        for _ in range(draw(st.integers(0, 2)) if in_boot else 0):
            end = draw(st.integers(1, len(in_boot)))
            again = in_boot[draw(st.integers(0, end - 1)) : end]
            in_boot[end:end] = again
        made += in_boot
        made += made[draw(st.integers(0, len(made))) :] if draw(st.booleans()) else []
        time_ns += draw(st.sampled_from([0, 60])) * SECOND_NS
    return made


@st.composite
def node_pods(draw: st.DrawFn, node: str) -> list[PodRecord | str]:
    """Draw the records of a node's pods in order; a UID without a record is a tombstone."""
    reported: list[PodRecord | str] = []
    for number in range(PODS_A_NODE):
        first = pod(number, uid=uid_of(node, number), node=node)
        named = replace(
            first,
            containers=[replace(first.containers[0], container_id=container_of(node, number))],
        )
        later = replace(named, labels={"team": "another"}, resource_version="8")
        versions = [named, later][: draw(st.integers(0, 2))]
        reported += versions + versions[: draw(st.integers(0, 1))]
        if draw(st.booleans()):
            reported.append(named.uid)
    return reported


@st.composite
def topics(draw: st.DrawFn) -> Topics:
    """Draw all topics."""
    samples: dict[int, list[Record]] = {}
    pods: dict[int, list[Record]] = {}
    for partition in PARTITIONS:
        nodes = [node for node, place in NODES if place == partition]
        merged = draw(merges([draw(node_ticks(node)) for node in nodes]))
        samples[partition] = [
            Record(
                SAMPLES.name,
                partition,
                2 * place,
                one.time_ns // 10**6,
                node_key(one).encode(),
                encode(one),
            )
            for place, one in enumerate(merged)
        ]
        reported = draw(merges([draw(node_pods(node)) for node in nodes]))
        pods[partition] = [_pod_record(partition, place, one) for place, one in enumerate(reported)]
    return Topics(samples, pods)


def _named(record: Record) -> str:
    one = decoder_of(SAMPLES.name, NodeSample).decode(record.value)
    return f"{one.node}/{one.boot_id}/{one.seq}"


def merges(lists: Sequence[Sequence[T]]) -> st.SearchStrategy[list[T]]:
    """Merge lists in any way that keeps the order of each."""
    turns = [place for place, one in enumerate(lists) for _ in one]

    def merge(order: Sequence[int]) -> list[T]:
        rest = [iter(one) for one in lists]
        return [next(rest[place]) for place in order]

    return st.permutations(turns).map(merge)


def _pod_record(partition: int, offset: int, reported: PodRecord | str) -> Record:
    uid, value = (reported, None) if isinstance(reported, str) else (reported.uid, encode(reported))
    return Record(
        PODS.name,
        partition,
        offset,
        BEGIN_NS // 10**6 + offset,
        key_in("default", uid).encode(),
        value,
    )
