"""`gpuledger cluster retire` ends the GPUs of a deleted cluster, over the bus in memory."""

from typing import Any

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import decoder_of, encode
from gpuledger.completeness import message_of
from gpuledger.errors import UserError
from gpuledger.keys import NodeId, key_in
from gpuledger.records import GpuFacts, Inventory, PendingPodRecord, Watermark
from gpuledger.topics import partition_of_node
from gpuledger_cli.cluster import Retired, retire_from
from gpuledger_cli.watermarks import read_watermarks
from gpuledger_reports.reading.inventory import NEVER_US, InventoryRow, stays_of
from gpuledger_reports.reading.times import HOUR_US
from gpuledger_sinks.store.dimensions import rows_of_inventory
from tests.default_topics import INVENTORY, PENDING_PODS, PODS, SAMPLES, WATERMARKS
from tests.errors import has_words
from tests.unit.sinks.builders import PARTITIONS, START_NS, bus

HOUR_NS = 3_600 * 10**9
NOW_NS = START_NS + HOUR_NS
"""An hour after the nodes have published their inventories."""
A, B = NodeId("gone", "node-a"), NodeId("gone", "node-b")
STAYS = NodeId("stays", "node-a")
DECODER = decoder_of(INVENTORY.name, Inventory)


def home(node: NodeId) -> int:
    return partition_of_node(key_in(*node), partitions=PARTITIONS)


async def put(on: MemoryBus, topic: str, node: NodeId, value: bytes | None, *, ago_s: int) -> None:
    message = Message(key_in(*node).encode(), value, NOW_NS // 10**6 - ago_s * 1000)
    async with on.producer() as producer:
        await producer.publish(topic, home(node), [message])


def inventory(node: NodeId, *gpus: str, after_s: int = 0) -> Inventory:
    facts = [
        GpuFacts(uuid=uuid, index=index, model="H100", instances=[], capabilities=[])
        for index, uuid in enumerate(gpus)
    ]
    time_ns = START_NS + after_s * 10**9
    return Inventory(cluster=node.cluster, node=node.node, boot_id="b", time_ns=time_ns, gpus=facts)


async def reported(*inventories: Inventory, podwatch_ago_s: int | None = None) -> MemoryBus:
    """Return a bus with these inventories, and podwatch's watermarks of the deleted cluster."""
    on = bus()
    for each in inventories:
        node = NodeId(each.cluster, each.node)
        await put(on, INVENTORY.name, node, encode(each), ago_s=3600)
    async with on.producer() as producer:
        for partition in range(PARTITIONS) if podwatch_ago_s is not None else ():
            watermark = Watermark(
                component="podwatch",
                cluster="gone",
                partition=partition,
                complete_until_ns=NOW_NS - (podwatch_ago_s or 0) * 10**9,
                topic=PODS.name,
                next_offset=12,
                publisher="test",
            )
            message = message_of(watermark, time_ns=NOW_NS)
            await producer.publish(WATERMARKS.name, partition, [message])
    return on


async def retire(on: MemoryBus, node: str | None = None, *, ago_s: int = 0) -> Retired:
    since_ns = NOW_NS - ago_s * 10**9
    return await retire_from(on, "gone", node, now_ns=NOW_NS, since_ns=since_ns)


def stays(on: MemoryBus) -> list[tuple[NodeId, str, int | None]]:
    """Return each GPU's node and end in hours from the start, as store and bill calculate them."""
    rows = [
        InventoryRow(cluster, node, since_us, record.offset, gpu, model)
        for record in on.kept(INVENTORY.name)
        for cluster, node, since_us, gpu, model, *_ in rows_of_inventory(
            DECODER.decode(record.value), record
        )
    ]
    return [
        (
            NodeId(*stay.node),
            stay.physical_gpu,
            None if stay.end_us == NEVER_US else (stay.end_us - START_NS // 1000) // HOUR_US,
        )
        for stay in stays_of(rows, {})
    ]


async def test_the_gpus_of_a_deleted_cluster_end_with_or_without_podwatchs_watermarks() -> None:
    for podwatch_ago_s in (None, 60):
        on = await reported(
            inventory(A, "GPU-a", "GPU-b"),
            inventory(B, "GPU-c"),
            inventory(STAYS, "GPU-d"),
            podwatch_ago_s=podwatch_ago_s,
        )
        watermarks = PARTITIONS if podwatch_ago_s else 0

        assert await retire(on) == Retired(watermarks=watermarks, nodes=2, gpu_count=3)
        assert sorted(stays(on)) == [
            (A, "GPU-a", 1),
            (A, "GPU-b", 1),
            (B, "GPU-c", 1),
            (STAYS, "GPU-d", None),
        ]
        assert await read_watermarks(on, "podwatch") == (PARTITIONS, [])


async def test_one_node_is_retired_and_its_cluster_stays() -> None:
    on = await reported(inventory(A, "GPU-a"), inventory(B, "GPU-c"), podwatch_ago_s=0)

    assert await retire(on, "node-a") == Retired(watermarks=0, nodes=1, gpu_count=1)
    assert sorted(stays(on)) == [(A, "GPU-a", 1), (B, "GPU-c", None)]
    assert len((await read_watermarks(on, "podwatch"))[1]) == PARTITIONS


def waiting(uid: str, cluster: str = "gone", **changes: Any) -> PendingPodRecord:  # noqa: ANN401  # any field
    values: dict[str, Any] = {
        "cluster": cluster,
        "uid": uid,
        "namespace": "ns",
        "name": f"pod-{uid}",
        "labels": {},
        "containers": [],
        "created_time_ns": START_NS,
        "resource_version": "1",
    }
    return PendingPodRecord(**values | changes)


async def test_the_pods_of_a_deleted_cluster_no_longer_wait() -> None:
    on = await reported(inventory(A, "GPU-a"))
    left, forgotten = waiting("left", left_time_ns=START_NS + 1), waiting("forgotten")
    pods = [waiting("a"), waiting("a", reason="Unschedulable"), left, forgotten]
    pods.append(waiting("other", cluster="stays"))
    messages = [Message(key_in(pod.cluster, pod.uid).encode(), encode(pod), 0) for pod in pods]
    async with on.producer() as producer:
        await producer.publish(PENDING_PODS.name, 0, messages)
        await producer.publish(PENDING_PODS.name, 0, [Message(b"gone/forgotten", None, 0)])

    assert (await retire(on)).pending_pods == 1
    assert (await retire(on)).pending_pods == 0

    (last,) = on.kept(PENDING_PODS.name)[len(messages) + 1 :]
    decoder = decoder_of(PENDING_PODS.name, PendingPodRecord)
    ended = waiting("a", reason="Unschedulable", left_time_ns=NOW_NS)
    assert (last.key, decoder.decode(last.value or b"")) == (b"gone/a", ended)


async def test_a_second_retirement_has_no_effect_and_an_inventory_of_the_agent_ends_it() -> None:
    on = await reported(inventory(A, "GPU-a"))
    await retire(on)
    assert await retire(on) == Retired(watermarks=0, nodes=0, gpu_count=0)
    again = inventory(A, "GPU-a", after_s=2 * 3600)
    await put(on, INVENTORY.name, A, encode(again), ago_s=0)

    assert stays(on) == [(A, "GPU-a", 1), (A, "GPU-a", None)]


async def test_a_retirement_may_be_backdated() -> None:
    on = await reported(inventory(A, "GPU-a"))
    await retire(on, ago_s=1800)

    (gone,) = [DECODER.decode(each.value) for each in on.kept(INVENTORY.name)][1:]
    assert (gone.time_ns, gone.gpus) == (NOW_NS - 1800 * 10**9, [])


async def test_a_node_whose_clock_is_ahead_is_retired_too() -> None:
    on = await reported(inventory(A, "GPU-a", after_s=5 * 3600))
    await retire(on)

    assert stays(on) == []


@pytest.mark.parametrize(
    ("node", "says"),
    [(None, ("other", "gone", "stays")), ("node-c", ("node-c", "node-a", "node-b"))],
)
async def test_an_unknown_cluster_or_node_is_rejected_with_the_known_ones(
    node: str | None, says: tuple[str, ...]
) -> None:
    on = await reported(inventory(A, "GPU-a"), inventory(B, "GPU-b"), inventory(STAYS, "GPU-c"))
    cluster = "other" if node is None else "gone"
    with pytest.raises(UserError, check=has_words(*says)):
        await retire_from(on, cluster, node, now_ns=NOW_NS, since_ns=NOW_NS)


@pytest.mark.parametrize("node", [None, "node-b"])
async def test_nothing_is_retired_while_an_agent_ticks(node: str | None) -> None:
    on = await reported(inventory(A, "GPU-a"), inventory(B, "GPU-b"))
    await put(on, SAMPLES.name, A, b"any tick", ago_s=121)
    await put(on, SAMPLES.name, B, b"any tick", ago_s=119)
    with pytest.raises(UserError, check=has_words("node-b", "stop")):
        await retire(on, node)

    assert [end for *_, end in stays(on)] == [None, None]
    assert (await retire(on, "node-a")).gpu_count == 1


async def test_nothing_is_retired_while_podwatch_runs() -> None:
    on = await reported(inventory(A, "GPU-a"), podwatch_ago_s=59)
    with pytest.raises(UserError, check=has_words("podwatch", "was running", "stop it")):
        await retire(on)

    assert [end for *_, end in stays(on)] == [None]
    assert len((await read_watermarks(on, "podwatch"))[1]) == PARTITIONS


@pytest.mark.parametrize("ago_s", [-1, 3601])
async def test_the_time_of_a_retirement_is_neither_in_the_future_nor_before_the_inventory(
    ago_s: int,
) -> None:
    on = await reported(inventory(A, "GPU-a"))
    with pytest.raises(UserError, check=has_words("--since")):
        await retire(on, ago_s=ago_s)


async def test_an_inventory_that_the_store_rejects_is_ignored() -> None:
    on = await reported()
    await put(on, INVENTORY.name, B, encode(inventory(A, "GPU-a")), ago_s=3600)
    await put(on, INVENTORY.name, B, b"{", ago_s=3600)
    with pytest.raises(UserError, check=has_words("gone")):
        await retire(on)
