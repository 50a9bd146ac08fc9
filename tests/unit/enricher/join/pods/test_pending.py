"""Pods whose records have not come are counted, waited for and given up."""

import pytest
from structlog.testing import capture_logs

from gpuledger.records import ContainerRef, PodState
from gpuledger_enricher.join.pods.pending import PendingPods
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import CONTAINER_IDS, SECOND_NS, UIDS, pod, process

FIRST = ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])
HASHED = ContainerRef(pod_uid="a" * 32, container_id=CONTAINER_IDS[0])
PENDING = "gpuledger_join_pending_pods"
UNKNOWN = "gpuledger_join_unknown_pods_total"
RESOLVED = "gpuledger_join_pending_delay_seconds_count"
DELAY = "gpuledger_join_pending_delay_seconds_sum"


@pytest.fixture
def given() -> Given:
    """Return a stage that waits 120 seconds for a pod's record."""
    return Given()


def tick(given: Given, *containers: ContainerRef) -> PodState | None:
    """Offer a tick with these containers; return the state of the first pod."""
    processes = [process(container=place) for place in range(len(containers))]
    event = given.take(containers=list(containers), processes=processes)
    return event.pods[0].state if event.pods else None


NAMED = [
    ("its UID", ContainerRef(pod_uid=UIDS[0]), pod()),
    ("a container", ContainerRef(container_id=CONTAINER_IDS[0]), pod()),
    ("a hash", ContainerRef(pod_uid="a" * 32), pod(config_hash="a" * 32)),
    ("a hash, found by its container", HASHED, pod()),
]


@pytest.mark.parametrize(("case", "container", "came"), NAMED)
def test_a_pod_is_waited_for_until_its_record_comes(
    given: Given, case: str, container: ContainerRef, came: object
) -> None:
    """The gauge shows it, and how long it took."""
    before = value_of(RESOLVED), value_of(DELAY)
    assert tick(given, container) is PodState.PENDING
    given.wait(2)
    tick(given, container)
    assert value_of(PENDING) == 1
    given.read_pod(came)  # type: ignore[arg-type]  # a PodRecord, from the table
    assert tick(given, container) is PodState.KNOWN, case
    assert value_of(PENDING) == 0
    assert value_of(RESOLVED) - before[0] == 1
    assert value_of(DELAY) - before[1] == pytest.approx(2.0)


def test_two_containers_of_a_pod_are_one_pod_that_is_waited_for(given: Given) -> None:
    """Pods are counted, not containers."""
    tick(given, FIRST, ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[1]))
    assert value_of(PENDING) == 1


def test_a_process_of_the_host_is_not_waited_for(given: Given) -> None:
    """It has no pod."""
    tick(given, ContainerRef())
    assert value_of(PENDING) == 0


def test_a_pod_that_does_not_come_is_reported_as_unknown_once(given: Given) -> None:
    """It is counted and logged once, however long its ticks come."""
    before = value_of(UNKNOWN)
    with capture_logs() as logs:
        for _ in range(50):
            tick(given, FIRST)
            given.wait(10)
    assert value_of(UNKNOWN) - before == 1
    assert value_of(PENDING) == 0
    reported = [line for line in logs if line["event"] == "pods_not_found"]
    assert [(line["count"], line["node"]) for line in reported] == [(1, "node-a")]
    assert reported[0]["example"] == [UIDS[0], CONTAINER_IDS[0]]


def test_an_unknown_pod_whose_record_comes_later_is_described(given: Given) -> None:
    """The description becomes known whenever the record comes."""
    tick(given, FIRST)
    given.wait(300)
    tick(given, FIRST)
    given.read_pod(pod())
    assert tick(given, FIRST) is PodState.KNOWN


def test_a_pod_that_no_tick_names_any_more_is_forgotten(given: Given) -> None:
    """After its timeout, whether its record came or not."""
    pending = PendingPods(pending_pod_timeout_seconds=120)
    pending.record([(UIDS[0], None)], node="default/node-a", partition=3, now_ns=T_NS)
    assert [one.names for one in pending.expire(T_NS + 121 * SECOND_NS)] == [[f"default/{UIDS[0]}"]]
    assert pending.resolve(pod()) == []


def test_the_number_of_pods_that_are_waited_for_is_bounded() -> None:
    """The oldest make room, and are unknown from then on."""
    pending = PendingPods(pending_pod_timeout_seconds=120, max_pods=10)
    for number in range(25):
        pending.record([(f"uid-{number}", None)], node="default/node-a", partition=3, now_ns=T_NS)
    assert len(pending) == 10
    assert [one.names[0] for one in pending.expire(T_NS + SECOND_NS)] == [
        f"default/uid-{number}" for number in range(15)
    ]


def test_pods_of_a_revoked_partition_are_no_longer_waited_for() -> None:
    """Another worker waits for them now."""
    pending = PendingPods(pending_pod_timeout_seconds=120)
    pending.record([(UIDS[0], None)], node="default/node-a", partition=3, now_ns=T_NS)
    pending.record([(UIDS[1], None)], node="default/node-b", partition=4, now_ns=T_NS)
    pending.forget(3)
    assert len(pending) == 1
    assert pending.resolve(pod(0)) == []
    assert len(pending.resolve(pod(1))) == 1
