"""Pods that request GPUs and wait for a node: their records, and the published versions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.codec import decoder_of, encode
from gpuledger.records import ContainerRequest, PendingContainer, PendingPodRecord, PodRecord
from gpuledger.records.bounds import MAX_SENTENCE_LENGTH
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.decode import PendingPodReader
from gpuledger_enricher.podwatch.kinds import PENDING_POD
from gpuledger_enricher.podwatch.pod_metrics import (
    PENDING_GPU_PODS,
    PENDING_GPUS,
    measure_pending_pods,
)
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_enricher.podwatch.publish import encode_bounded
from gpuledger_enricher.podwatch.table import ObjectTable
from gpuledger_simulator.kube import KubeApi, serve_kube_api, write_kubeconfig
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import PENDING_PODS, PODS, TOPICS
from tests.unit.enricher.podwatch.builders import (
    CREATED_NS,
    Object,
    PatientClock,
    encoded,
    owned_by,
    pod,
    soon,
)
from tests.unit.enricher.podwatch.running import StillClock, running
from tests.unit.enricher.podwatch.test_simulated_api import SimulatedCluster

GPUS = {"limits": {"nvidia.com/gpu": "8"}}
GATED = "Scheduling is blocked due to non-empty scheduling gates"


def waiting(uid: str = "u1", **more: Any) -> Object:  # noqa: ANN401  # any field of a pod
    """Return a pod without a node, whose only container requests eight GPUs."""
    containers = {"containers": [{"name": "main", "resources": GPUS}]}
    spec, status = containers | more.pop("spec", {}), {"phase": "Pending"} | more.pop("status", {})
    return pod(uid, node=None, spec=spec, status=status | {"containerStatuses": None}, **more)


def refused(reason: str, message: str, **more: Any) -> Object:  # noqa: ANN401  # any field of a pod
    """Return a waiting pod that a scheduler has refused."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return waiting(status={"conditions": [condition]}, **more)


def read(item: Object) -> PendingPodRecord | None:
    reader = PendingPodReader(
        cluster="default", labels=["team"], gpu_resource_prefixes=["nvidia.com/gpu"]
    )
    return reader.read(encoded(item))


def test_a_waiting_pod_becomes_a_record_that_every_reader_of_the_topic_can_decode() -> None:
    spec = {
        "priority": 7,
        "priorityClassName": "high",
        "schedulingGates": [{"name": "example.com/quota"}],
        "initContainers": [{"name": "test", "resources": GPUS}, {"name": "fetch"}],
        "overhead": {"cpu": "4"},
    }
    metadata = {
        "labels": {"team": "nlp", "other": "x"},
        "ownerReferences": [owned_by("PyTorchJob", "train")],
    }

    found = read(refused("SchedulingGated", GATED, spec=spec, metadata=metadata))

    requested = ContainerRequest(resources={"nvidia.com/gpu": 8})
    assert found == PendingPodRecord(
        cluster="default",
        uid="u1",
        namespace="team-red",
        name="pod-u1",
        owner_kind="PyTorchJob",
        owner_name="train",
        labels={"team": "nlp"},
        containers=[
            PendingContainer(name="test", kind="init", requested=requested),
            PendingContainer(name="main", requested=requested),
        ],
        priority=7,
        requested_cpu_millicores=4000,
        requested_memory_bytes=0,
        priority_class="high",
        scheduling_gates=["example.com/quota"],
        reason="SchedulingGated",
        message=GATED,
        created_time_ns=CREATED_NS,
        resource_version="7",
    )
    assert decoder_of(PENDING_PODS.name, PendingPodRecord).decode(encode(found)) == found


@pytest.mark.parametrize(
    ("labels", "annotations", "queue"),
    [
        ({}, {}, None),
        ({"team": "nlp"}, {"team": "nlp"}, None),
        ({"kueue.x-k8s.io/queue-name": "q"}, {}, "q"),
        ({"kai.scheduler/queue": "q"}, {}, "q"),
        ({"runai/queue": "q"}, {}, "q"),
        ({"volcano.sh/queue-name": "q"}, {}, "q"),
        ({}, {"volcano.sh/queue-name": "q"}, "q"),
        ({}, {"scheduling.volcano.sh/queue-name": "q"}, "q"),
        ({}, {"slurmjob.slinky.slurm.net/partition": "q"}, "q"),
        ({"runai/queue": "old", "kai.scheduler/queue": "new"}, {}, "new"),
        ({"kai.scheduler/queue": ""}, {"scheduling.volcano.sh/queue-name": "q"}, "q"),
    ],
)
def test_the_queue_is_that_of_the_scheduler_whose_label_or_annotation_names_it(
    labels: dict[str, str], annotations: dict[str, str], queue: str | None
) -> None:
    found = read(waiting(metadata={"labels": labels, "annotations": annotations}))

    assert found
    assert found.queue == queue


MPS = {"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "50"}
CLAIM: Object = {
    "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
}
CREATED_CLAIM = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x7k2p"}]}


@pytest.mark.parametrize(
    ("spec", "status", "requests"),
    [
        ({"containers": [{"name": "main"}]}, {}, False),
        ({"containers": [{"name": "main", "resources": {"limits": {"cpu": "8"}}}]}, {}, False),
        ({"containers": [{"name": "main", "env": [MPS]}]}, {}, False),
        (CLAIM, {}, False),
        (CLAIM, CREATED_CLAIM, True),
        ({"containers": [{"name": "a"}, {"name": "b", "resources": GPUS}]}, {}, True),
        ({"initContainers": [{"name": "a", "resources": GPUS}]}, {}, True),
    ],
)
def test_only_pods_that_request_gpus_or_have_a_claim_are_records(
    spec: Object, status: Object, *, requests: bool
) -> None:
    assert (read(waiting(spec=spec, status=status)) is not None) is requests


def test_a_long_message_and_too_many_gates_are_cut() -> None:
    gates = {"schedulingGates": [{"name": f"example.com/{number}"} for number in range(300)]}
    found = read(refused("SchedulingGated", "x" * 9_999, spec=gates))
    assert found
    assert found.message == "x" * MAX_SENTENCE_LENGTH

    value = encode_bounded(found, kind=PENDING_POD, topics=TOPICS)

    kept = decoder_of(PENDING_PODS.name, PendingPodRecord).decode(value)
    assert kept.scheduling_gates == [f"example.com/{number}" for number in range(256)]


def busy(nodes: int) -> str:
    return f"0/{nodes} nodes are available: {nodes} Insufficient nvidia.com/gpu."


CHANGES: list[tuple[str, Object, bool]] = [
    ("version", refused("Unschedulable", busy(4), version="8"), False),
    ("message", refused("Unschedulable", busy(5), version="8"), False),
    ("reason", refused("SchedulerError", busy(4), version="8"), True),
    ("priority", refused("Unschedulable", busy(4), version="8", spec={"priority": 3}), True),
    (
        "queue",
        refused(
            "Unschedulable",
            busy(4),
            version="8",
            metadata={"labels": {"kai.scheduler/queue": "q"}, "resourceVersion": "8"},
        ),
        True,
    ),
    (
        "gates",
        refused("Unschedulable", busy(4), version="8", spec={"schedulingGates": [{"name": "g"}]}),
        True,
    ),
]


@pytest.mark.parametrize(
    ("changed", "is_published"),
    [(item, is_published) for _, item, is_published in CHANGES],
    ids=[name for name, *_ in CHANGES],
)
def test_a_change_of_only_the_schedulers_message_is_not_published(
    changed: Object, *, is_published: bool
) -> None:
    before, after = read(refused("Unschedulable", busy(4))), read(changed)
    assert before
    assert after
    table = ObjectTable(
        tombstone_after_seconds=900,
        max_tombstones=100,
        node_of=PENDING_POD.node_of,
        identity_of=PENDING_POD.identity_of,
        as_known=PENDING_POD.as_known,
    )
    # Restored from the topic, as after a restart.
    table.restore([before])

    table.upsert(after, time_ns=1)

    assert [message.record for message in table.batch(10)] == ([after] if is_published else [])
    table.delete(after, time_ns=2)
    (end,) = table.batch(10)
    assert end.record
    assert (end.record.message, end.record.left_time_ns) == (after.message, 2)


def gauges() -> dict[tuple[str, str], tuple[float, float]]:
    """Return the number of pods and of GPUs by namespace and reason."""
    found: dict[tuple[str, str], list[float]] = {}
    for metric in (PENDING_GPU_PODS, PENDING_GPUS):
        for family in metric.collect():
            for sample in family.samples:
                key = sample.labels["namespace"], sample.labels["reason"]
                found.setdefault(key, []).append(sample.value)
    return {key: (pods, gpus) for key, (pods, gpus) in found.items()}


def test_pods_and_gpus_that_wait_are_counted_by_namespace_and_known_reason() -> None:
    def one(namespace: str, reason: str | None, *amounts: dict[str, int]) -> PendingPodRecord:
        containers = [
            PendingContainer(name="c", requested=ContainerRequest(resources=each))
            for each in amounts
        ]
        return PendingPodRecord(
            cluster="default",
            uid="u",
            namespace=namespace,
            name="p",
            labels={},
            containers=containers,
            reason=reason,
            created_time_ns=1,
            resource_version="1",
        )

    gpu, mig = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
    pods = [
        one("red", "Unschedulable", {gpu: 8}, {gpu: 1}),
        one("red", "Unschedulable", {mig: 2}),
        one("red", "SchedulingGated", {gpu: 1}),
        one("blue", None, {gpu: 1}),
        one("blue", "tenant-chosen", {gpu: 2}),
    ]

    measure_pending_pods(pods)

    assert gauges() == {
        ("red", "Unschedulable"): (2, 9),
        ("red", "SchedulingGated"): (1, 1),
        ("blue", "other"): (2, 3),
    }
    measure_pending_pods(pods[:1])
    assert gauges() == {("red", "Unschedulable"): (1, 9)}
    measure_pending_pods(())
    assert gauges() == {}


async def test_a_pod_is_counted_while_it_waits(cluster: SimulatedCluster) -> None:
    bus, settings = MemoryBus(), settings_of(cluster)
    await cluster.create_pod("train", node=None, gpus=4)
    async with running(bus=bus, settings=settings, readiness=Readiness(), clock=StillClock()):
        await soon(lambda: gauges() == {(cluster.namespace, "other"): (1, 4)})
        await cluster.refuse("train", reason="Unschedulable", message=busy(4))
        await soon(lambda: gauges() == {(cluster.namespace, "Unschedulable"): (1, 4)})
        await cluster.bind("train")
        await soon(lambda: gauges() == {})


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[SimulatedCluster]:
    simulation = Simulation(load_scenario("scenarios/quickstart.yaml"), epoch_ns=0)
    api = KubeApi(simulation, bookmark_seconds=0.01)
    kubeconfig = tmp_path / "kubeconfig"
    async with serve_kube_api(api, play=False) as url, aiohttp.ClientSession() as session:
        write_kubeconfig(kubeconfig, url)
        found = SimulatedCluster(api=api, url=url, session=session, kubeconfig=kubeconfig)
        await found.prepare()
        yield found


def settings_of(cluster: SimulatedCluster) -> PodwatchSettings:
    return PodwatchSettings(
        kubernetes=KubernetesSettings(kubeconfig=str(cluster.kubeconfig)),
        tombstone_after_seconds=60,
    )


def waits(bus: MemoryBus) -> dict[str, list[PendingPodRecord | None]]:
    """Return the versions of each pod in the topic of pending pods, by key."""
    decode = decoder_of(PENDING_PODS.name, PendingPodRecord).decode
    found: dict[str, list[PendingPodRecord | None]] = {}
    for record in bus.kept(PENDING_PODS.name):
        versions = found.setdefault((record.key or b"").decode(), [])
        versions.append(None if record.value is None else decode(record.value))
    return found


def lives(bus: MemoryBus) -> dict[str, PodRecord]:
    """Return the last version of each pod in the topic of pods, by key."""
    decode = decoder_of(PODS.name, PodRecord).decode
    return {
        (record.key or b"").decode(): decode(record.value)
        for record in bus.kept(PODS.name)
        if record.value is not None
    }


async def create(cluster: SimulatedCluster) -> dict[str, str]:
    """Create three pods that wait and one that does not request GPUs; return the UIDs by name."""
    await cluster.create_pod("without-gpus", node=None, gpus=0)
    names = ("placed", "given-up", "waits")
    return {name: await cluster.create_pod(name, node=None, gpus=2) for name in names}


async def refuse(cluster: SimulatedCluster) -> None:
    """Refuse two of them, one of them again and again."""
    await cluster.refuse("given-up", reason="Unschedulable", message=busy(4))
    for nodes in range(4, 9):
        await cluster.refuse("placed", reason="Unschedulable", message=busy(nodes))


async def decide(cluster: SimulatedCluster) -> None:
    """Place one of them and delete another one."""
    await cluster.bind("placed")
    await cluster.delete_pod("given-up")


Step = tuple[Callable[[], Awaitable[None]], list[int]]
"""An act, and how many versions of each pod are published after it."""


@pytest.mark.parametrize("restarts", [False, True])
async def test_every_pod_that_waited_ends_once_and_a_restart_changes_nothing(
    cluster: SimulatedCluster, *, restarts: bool
) -> None:
    bus, settings, uids = MemoryBus(), settings_of(cluster), dict[str, str]()

    async def play(*steps: Step) -> None:
        async with running(bus=bus, settings=settings, readiness=Readiness(), clock=StillClock()):
            for act, published in steps:
                await act()
                await soon(lambda: sorted(map(len, waits(bus).values())) == published)  # noqa: B023  # awaited here
                await asyncio.sleep(0.02)
                assert sorted(map(len, waits(bus).values())) == published

    async def begin() -> None:
        uids.update(await create(cluster))

    async def rest() -> None:
        """Do nothing."""

    steps: list[Step] = [
        (begin, [1, 1, 1]),
        (partial(refuse, cluster), [1, 2, 2]),
        (partial(decide, cluster), [1, 3, 3]),
        (rest, [1, 3, 3]),
    ]
    if restarts:
        for step in steps:
            await play(step)
    else:
        await play(*steps)

    assert {name: ends(waits(bus)[f"default/{uid}"]) for name, uid in uids.items()} == {
        "placed": [False, False, True],
        "given-up": [False, False, True],
        "waits": [False],
    }
    (placed,) = lives(bus).values()
    first = waits(bus)[f"default/{uids['placed']}"][0]
    assert first
    assert (placed.uid, placed.created_time_ns) == (uids["placed"], first.created_time_ns)
    assert placed.scheduled_time_ns is not None


def ends(versions: Sequence[PendingPodRecord | None]) -> list[bool]:
    """Return which versions of a pod end its waiting; check their order."""
    records = [each for each in versions if each is not None]
    order = [int(each.resource_version) for each in records]
    assert order == sorted(set(order))
    return [each.left_time_ns is not None for each in records]


async def test_pods_that_stop_waiting_while_podwatch_is_stopped_end_and_get_tombstones(
    cluster: SimulatedCluster,
) -> None:
    bus, settings = MemoryBus(), settings_of(cluster)
    uids = [await cluster.create_pod(name, node=None) for name in ("placed", "given-up")]
    async with running(bus=bus, settings=settings, readiness=Readiness(), clock=StillClock()):
        await soon(lambda: [len(each) for each in waits(bus).values()] == [1, 1])
    await cluster.bind("placed")
    await cluster.delete_pod("given-up")
    clock = PatientClock(start_ns=2**62)

    async with running(bus=bus, settings=settings, readiness=Readiness(), clock=clock):
        await soon(lambda: [len(each) for each in waits(bus).values()] == [3, 3])

    for uid in uids:
        _, end, tombstone = waits(bus)[f"default/{uid}"]
        assert end
        assert end.left_time_ns
        assert tombstone is None
