"""A pod is described by the version that was in force at the tick's time."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.records import ContainerRef, PodContainer, PodDescription, PodRecord, PodState
from gpuledger_enricher.join.pods.describe import DescriptionCache
from gpuledger_enricher.join.pods.pods import (
    MAX_FORMER_CONTAINERS,
    MAX_PAST_VERSIONS,
    ClusterPods,
    KnownPod,
    PodCache,
)
from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import CONTAINER_IDS, SECOND_NS, UIDS, pod, process, sample

HASH = "a" * 32
FIRST = [ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])]
BY_ID = [ContainerRef(container_id=CONTAINER_IDS[0])]
BY_HASH = [ContainerRef(pod_uid=HASH)]


@pytest.fixture
def given() -> Given:
    return Given()


def described(given: Given, containers: list[ContainerRef], at_seconds: float) -> PodDescription:
    """Return the description of the only pod of a tick that ends this long after `T_NS`."""
    time_ns = T_NS + round(at_seconds * SECOND_NS)
    event = given.take(containers=containers, processes=[process(container=0)], time_ns=time_ns)
    (pod,) = event.pods
    return pod


def labelled(value: str) -> PodRecord:
    """Return the first pod with a label."""
    return pod(labels={"team": value})


VERSIONS = [("first", 0), ("second", 10), ("third", 20)]
IN_FORCE = [(-5, "first"), (5, "first"), (10, "second"), (19, "second"), (20, "third")]


@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize(("at_seconds", "value"), IN_FORCE)
def test_a_tick_is_described_by_the_version_in_force_at_its_time(
    given: Given, at_seconds: int, value: str, again: int
) -> None:
    """Whether it comes in time or late, and however often the topic was read."""
    for _ in range(again + 1):
        for label, seen_seconds in VERSIONS:
            seen_ns = T_NS + seen_seconds * SECOND_NS
            given.read_pod(labelled(label), seen_time_ns=seen_ns)
    assert described(given, FIRST, at_seconds).labels == {"team": value}


def test_a_jobs_container_belongs_to_no_pod_and_none_is_waited_for(given: Given) -> None:
    job = ContainerRef(container_id=CONTAINER_IDS[0], job_id="7")
    given.read_pod(pod())
    event = given.take(containers=[job], processes=[process(container=0)])
    assert event.pods == []
    assert [one.pod for one in event.containers] == [None]


def test_a_late_tick_between_others_is_described_by_its_own_time(given: Given) -> None:
    """A cached description is valid only for the times that it was made for."""
    for label, seen_seconds in VERSIONS:
        given.read_pod(labelled(label), seen_time_ns=T_NS + seen_seconds * SECOND_NS)
    labels = [described(given, FIRST, at).labels for at in (30, 12, 31, 3, 32)]
    assert [each and each["team"] for each in labels] == [
        "third",
        "second",
        "third",
        "first",
        "third",
    ]


def test_a_process_that_outlives_its_pods_deletion_stays_with_that_pod(given: Given) -> None:
    """The description has the time of the deletion; that of earlier ticks does not."""
    given.read_pod(pod())
    given.read_pod(pod(deleted_time_ns=T_NS + 10 * SECOND_NS))
    after, before = described(given, FIRST, 12), described(given, FIRST, 8)
    assert (after.uid, after.name) == (before.uid, before.name) == (UIDS[0], "train-0")
    assert after.deleted_time_ns == T_NS + 10 * SECOND_NS
    assert before.deleted_time_ns is None


def restarted(number: int) -> PodRecord:
    """Return the first pod after that many restarts; its status names only the last container."""
    return pod(
        containers=[PodContainer(name="main", container_id=f"{number:064}", restarts=number)]
    )


def test_a_late_tick_of_a_restarted_container_finds_its_pod(given: Given) -> None:
    """By its id only, with the container's name, whether this or an earlier record had it."""
    given.read_pod(pod())
    given.read_pod(restarted(1))
    found = described(given, BY_ID, 0)
    assert (found.uid, found.state) == (UIDS[0], PodState.KNOWN)
    assert given.take(containers=BY_ID).containers[0].name == "main"
    again = PodContainer(
        name="main", container_id="e" * 64, previous_container_id="f" * 64, restarts=2
    )
    given.read_pod(pod(containers=[again]))
    assert described(given, [ContainerRef(container_id="f" * 64)], 0).name == "train-0"


def test_only_the_last_ids_of_a_container_that_keeps_restarting_are_kept() -> None:
    """Memory is bounded even for a pod in an endless crash loop."""
    cache = PodCache()
    for number in range(300):
        cache.put(restarted(number), partition=0)
    kept = [number for number in range(300) if cache.find(None, f"{number:064}", node="node-a")]
    assert kept == list(range(299 - MAX_FORMER_CONTAINERS, 300))


def after_changes(count: int, *, every_seconds: float) -> KnownPod:
    """Return the known versions of a pod whose label was changed this often."""
    cache = PodCache()
    for number in range(count):
        changed = msgspec.structs.replace(labelled(str(number)), resource_version=str(100 + number))
        seen_ns = T_NS + round(number * every_seconds * SECOND_NS)
        cache.put(changed, partition=0, seen_time_ns=seen_ns)
    found = cache.find(UIDS[0], None, node="node-a")
    assert found is not None
    return found


def test_a_pod_that_changes_a_thousand_times_is_described_by_each_version_in_its_time() -> None:
    found = after_changes(1000, every_seconds=1)
    for number in range(1000):
        assert found.at(T_NS + number * SECOND_NS).labels == {"team": str(number)}


def test_versions_are_kept_as_long_as_ticks_of_their_time_may_come() -> None:
    """Before that, the oldest kept version describes the pod."""
    found = after_changes(100, every_seconds=3600)
    assert found.at(T_NS + 92 * 3600 * SECOND_NS).labels == {"team": "92"}
    assert found.at(0).labels == {"team": "91"}


def test_memory_is_bounded_for_a_pod_that_changes_all_the_time() -> None:
    assert len(after_changes(MAX_PAST_VERSIONS + 100, every_seconds=0.1).past) == MAX_PAST_VERSIONS


CHANGES = st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), min_size=1, max_size=12)


@for_any(changes=CHANGES, read_again=st.lists(st.integers(0, 12), max_size=3), opaque=st.booleans())
def test_the_version_in_force_is_the_newest_seen_by_then_however_often_it_is_read(
    changes: list[tuple[int, str]],
    read_again: list[int],
    opaque: bool,  # noqa: FBT001  # Hypothesis passes it by name
) -> None:
    """Whatever podwatch's clock was set to in between, and wherever reading was interrupted."""
    cache = PodCache()
    for upto in (*read_again, len(changes)):
        for number, (seen, label) in enumerate(changes[:upto]):
            version = f"v{number}" if opaque else str(100 + number)
            changed = msgspec.structs.replace(labelled(label), resource_version=version)
            cache.put(changed, partition=0, seen_time_ns=seen)
    found = cache.find(UIDS[0], None, node="node-a")
    assert found is not None
    for time in range(52):
        seen_by_then = [label for seen, label in changes if seen <= time]
        expected = seen_by_then[-1] if seen_by_then else changes[0][1]
        assert found.at(time).labels == {"team": expected}


def test_a_version_with_the_same_description_costs_no_memory() -> None:
    """Most changes of a pod only affect its status."""
    cache = PodCache()
    for phase in ("Pending", "Running", "Succeeded"):
        cache.put(pod(phase=phase), partition=0, seen_time_ns=1)
    found = cache.find(UIDS[0], None, node="node-a")
    assert found is not None
    assert found.past == ()
    assert found.record.phase == "Succeeded"


OLD = pod(0, config_hash=HASH, created_time_ns=5)
GONE = pod(0, config_hash=HASH, created_time_ns=5, deleted_time_ns=8, resource_version="8")
NEW = pod(1, config_hash=HASH, created_time_ns=9)
NEW_GONE = pod(1, config_hash=HASH, created_time_ns=9, deleted_time_ns=11, resource_version="8")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([GONE, NEW], NEW),
        ([NEW, GONE], NEW),
        ([OLD, NEW, GONE], NEW),
        ([OLD, NEW, GONE, OLD], NEW),
        ([GONE, NEW_GONE], NEW),
        ([NEW_GONE, GONE], NEW),
    ],
)
def test_a_static_pods_hash_leads_to_its_newest_object_once_the_old_one_is_deleted(
    given: Given, order: Sequence[PodRecord], expected: PodRecord
) -> None:
    """Its cgroup keeps the hash when its object in the API server is recreated."""
    for each in order:
        given.read_pod(each)
    assert described(given, BY_HASH, 0).uid == expected.uid


FORMER = pod(
    0,
    config_hash=HASH,
    created_time_ns=T_NS,
    deleted_time_ns=T_NS + 10 * SECOND_NS,
    resource_version="8",
)
LATTER = pod(
    1,
    config_hash=HASH,
    created_time_ns=T_NS + 12 * SECOND_NS,
    # The same containers keep running when the object is recreated.
    containers=FORMER.containers,
)
CONTAINERS_OF_FORMER = [
    BY_HASH,
    BY_ID,
    [ContainerRef(pod_uid=HASH, container_id=CONTAINER_IDS[0])],
]


@pytest.mark.parametrize("containers", CONTAINERS_OF_FORMER)
@pytest.mark.parametrize("order", [[FORMER, LATTER], [LATTER, FORMER]])
def test_a_late_tick_of_a_static_pod_belongs_to_the_object_of_that_time(
    given: Given, containers: list[ContainerRef], order: Sequence[PodRecord]
) -> None:
    """Whatever the order of ticks and records; in between, the newer object counts."""
    for each in order:
        given.read_pod(each)
    found = [described(given, containers, at).uid for at in (20, 5, 11, 9, 12, 0, 10)]
    assert found == [UIDS[number] for number in (1, 0, 1, 0, 1, 0, 1)]


@pytest.mark.parametrize("order", [[OLD, NEW], [NEW, OLD], [OLD, NEW, OLD], [NEW, OLD, NEW]])
def test_no_younger_pod_takes_over_the_hash_of_a_live_one(
    given: Given, order: Sequence[PodRecord]
) -> None:
    """Whatever the order of their records: creating a pod later does not take over anyone's use."""
    for each in order:
        given.read_pod(each)
    assert described(given, BY_HASH, 0).uid == OLD.uid


@pytest.mark.parametrize("gone", [0, 1])
def test_if_two_pods_claim_a_hash_it_belongs_to_the_other_once_one_is_forgotten(
    given: Given, gone: int
) -> None:
    """Without either pod it leads nowhere."""
    for each in (OLD, NEW):
        given.read_pod(each)
    given.stage.pods.remove(f"default/{UIDS[gone]}", partition=3, time_ns=T_NS)
    assert described(given, BY_HASH, 0).uid == UIDS[1 - gone]
    given.stage.pods.remove(f"default/{UIDS[1 - gone]}", partition=3, time_ns=T_NS)
    given.stage.pods.forget_node("default/node-a")
    assert described(given, BY_HASH, 0).state is PodState.PENDING


def test_nodes_with_the_same_static_pod_hash_have_each_their_own_pod(given: Given) -> None:
    """For example if all nodes get their manifests from one address."""
    given.read_pod(pod(0, config_hash=HASH))
    given.read_pod(pod(1, config_hash=HASH, node="node-b"))
    for node, uid in (("node-a", UIDS[0]), ("node-b", UIDS[1])):
        (found,) = given.take(node=node, containers=BY_HASH).pods
        assert found.uid == uid


def test_pods_with_the_same_name_are_distinguished_by_their_uid(given: Given) -> None:
    """For example successive pods of a StatefulSet."""
    given.read_pod(pod(0, name="db-0", owner_name="old"))
    given.read_pod(pod(1, name="db-0", owner_name="new"))
    assert described(given, FIRST, 0).owner_name == "old"


def test_a_change_on_another_node_invalidates_no_description(given: Given) -> None:
    """A node's descriptions depend only on its own pods."""
    cache = PodCache()
    cache.put(pod(0), partition=0)
    before = cache.version_of("node-a")
    cache.put(pod(1, node="node-b"), partition=0)
    cache.remove(UIDS[1], partition=0, time_ns=T_NS)
    assert cache.version_of("node-a") == before
    cache.put(pod(0), partition=0)
    assert cache.version_of("node-a") != before


def test_the_cache_is_bounded_by_bytes_and_keeps_existing_nodes() -> None:
    """Made-up node names come only once each."""
    cache = DescriptionCache(ClusterPods(), max_bytes=200_000)
    honest = sample(processes=[process(container=0)])
    message = cache.describe(honest)

    for number in range(500):
        made_up = [ContainerRef(pod_uid="u" * 250, container_id=f"{each}") for each in range(50)]
        cache.describe(sample(node=f"made-up-{number}", containers=made_up))
        assert cache.describe(honest) is message

    assert len(cache) < 10
