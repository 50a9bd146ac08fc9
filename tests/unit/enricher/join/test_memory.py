"""A worker's memory is bounded by its partitions' nodes and pods, however many came and went."""

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import msgspec
import pytest

from gpuledger.records import ContainerRef, PodContainer
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import PODS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import pod, process, record, sample

PER_ROUND = 40
DAY_SECONDS = 86_400
_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def count_reachable(stage: JoinStage) -> int:
    """Return how many objects are reachable from the stage's own state."""
    own = {
        name: value
        for name, value in vars(stage).items()
        if name not in {"_dead_letters", "_time_ns"}
    }
    seen: dict[int, object] = {}
    waiting: list[object] = [own]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, _CODE):
            seen[id(one)] = one
            waiting += _parts(one)
    return len(seen)


def _parts(one: object) -> list[object]:
    """Return the objects that an object refers to; the collector ignores a cache's structs."""
    if isinstance(one, msgspec.Struct):
        return [getattr(one, name) for name in one.__struct_fields__]
    return gc.get_referents(one)


@pytest.fixture
def given() -> Given:
    return Given()


def live_a_round(given: Given, number: int, *, partition: int) -> list[str]:
    """Let new nodes tick with new pods, every second one without a record; return the pods."""
    uids = []
    for place in range(number * PER_ROUND, (number + 1) * PER_ROUND):
        uid, container_id = f"uid-{place}", f"{place:064}"
        uids.append(uid)
        if place % 2:
            containers = [PodContainer(name="main", container_id=container_id, restarts=0)]
            known = pod(uid=uid, node=f"node-{place}", containers=containers)
            read = record(known, topic=PODS.name, key=f"default/{uid}")
            given.stage.take_pods([read._replace(partition=partition)])
        tick = sample(
            node=f"node-{place}",
            time_ns=given.now_ns,
            containers=[ContainerRef(pod_uid=uid, container_id=container_id)],
            processes=[process(container=0)],
        )
        given.stage.take_samples([record(tick)._replace(partition=partition)])
    return uids


def test_the_memory_of_a_partition_is_freed_with_it(given: Given) -> None:
    """Partitions come and go, and the one that stays needs as much as before."""
    live_a_round(given, 0, partition=0)
    during = before = count_reachable(given.stage)
    for number in range(1, 11):
        live_a_round(given, number, partition=number)
        during = count_reachable(given.stage)
        given.stage.drain_progress(number)
        given.stage.forget(number)
    after = count_reachable(given.stage)
    assert during > 1.2 * before
    assert after <= before


def test_deleted_nodes_and_pods_of_a_partition_need_no_memory(given: Given) -> None:
    """For example if nodes are rented by the day, each under a new name."""
    sizes = []
    for number in range(8):
        uids = live_a_round(given, number, partition=3)
        given.stage.take_pods([record(None, topic=PODS.name, key=f"default/{uid}") for uid in uids])
        given.stage.drain_progress(3)
        sizes.append(count_reachable(given.stage))
        given.wait(DAY_SECONDS + 1)
    assert max(sizes[4:]) <= 1.1 * max(sizes[:4])
