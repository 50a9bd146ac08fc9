"""What a worker keeps is bounded by its partitions' nodes and pods, however many came and went."""

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
    """Return how many objects the stage's own state holds on to."""
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
    """Return what an object holds; the collector does not look into the structs of a cache."""
    if isinstance(one, msgspec.Struct):
        return [getattr(one, name) for name in one.__struct_fields__]
    return gc.get_referents(one)


@pytest.fixture
def given() -> Given:
    """Return a stage that has read nothing."""
    return Given()


def live_a_round(given: Given, number: int, *, partition: int) -> list[str]:
    """Have new nodes tick with new pods, every other one of which is not known; return the pods."""
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


def test_what_a_partition_needed_goes_with_it(given: Given) -> None:
    """Partitions come and go; the one that stays needs what it needed."""
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


def test_nodes_and_pods_that_are_gone_from_a_partition_need_nothing(given: Given) -> None:
    """As where nodes are hired by the day, each under a name of its own."""
    sizes = []
    for number in range(8):
        uids = live_a_round(given, number, partition=3)
        given.stage.take_pods([record(None, topic=PODS.name, key=f"default/{uid}") for uid in uids])
        given.stage.drain_progress(3)
        sizes.append(count_reachable(given.stage))
        given.wait(DAY_SECONDS + 1)
    assert max(sizes[4:]) <= 1.1 * max(sizes[:4])
