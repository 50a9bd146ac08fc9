"""Which pods are due in the table, and for how long."""

from gpuledger.records import PodRecord
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.table import ObjectTable
from tests.unit.enricher.podwatch.builders import encoded, pod, pod_record, reader_of

SECOND = 10**9
MOST = 100


def record(uid: str, *, version: str = "1", phase: str = "Running") -> PodRecord:
    reader = reader_of()
    found = reader.read(encoded(pod(uid, version=version, status={"phase": phase})))
    assert found is not None
    return found


def table(*, tombstone_after_seconds: float = 900.0, max_tombstones: int = 10) -> ObjectTable:
    return ObjectTable(
        node_of=POD.node_of,
        identity_of=POD.identity_of,
        tombstone_after_seconds=tombstone_after_seconds,
        max_tombstones=max_tombstones,
    )


def due(pods: ObjectTable) -> list[tuple[str, str]]:
    """Return the due pods by UID and state."""
    return [(one.identity, _state(one.record)) for one in pods.batch(MOST)]


def _state(found: PodRecord | None) -> str:
    if found is None:
        return "tombstone"
    return found.phase if found.deleted_time_ns is None else f"deleted {found.deleted_time_ns}"


def publish(pods: ObjectTable) -> list[tuple[str, str]]:
    """Acknowledge the due pods, and return them."""
    was = due(pods)
    pods.acknowledge(pods.batch(MOST))
    return was


def test_a_pod_is_due_until_it_is_acknowledged() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    assert due(pods) == [("a", "Running")]
    assert publish(pods) == [("a", "Running")]
    assert due(pods) == []
    assert (len(pods), pods.unpublished) == (1, 0)


def test_a_pod_that_differs_only_in_its_version_is_not_due_again() -> None:
    pods = table()
    pods.upsert(record("a", version="1"), time_ns=1)
    publish(pods)
    pods.upsert(record("a", version="2"), time_ns=2)
    assert due(pods) == []
    pods.upsert(record("a", version="3", phase="Succeeded"), time_ns=3)
    assert due(pods) == [("a", "Succeeded")]


def test_a_newer_state_replaces_one_that_waits() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    pods.upsert(record("a", phase="Failed"), time_ns=2)
    assert due(pods) == [("a", "Failed")]


def test_a_pod_that_changes_while_it_is_published_stays_due() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    on_the_way = pods.batch(MOST)
    pods.upsert(record("a", phase="Failed"), time_ns=2)
    pods.acknowledge(on_the_way)
    assert due(pods) == [("a", "Failed")]


def test_a_batch_is_limited_and_begins_with_the_longest_known_pods() -> None:
    pods = table()
    for number in range(5):
        pods.upsert(record(f"u{number}"), time_ns=number)
    assert [one.identity for one in pods.batch(2)] == ["u0", "u1"]


def test_a_deleted_pod_is_due_with_its_time_then_as_a_tombstone_then_never() -> None:
    pods = table(tombstone_after_seconds=900)
    pods.upsert(record("a"), time_ns=1)
    publish(pods)
    pods.delete(record("a", version="2"), time_ns=5 * SECOND)
    assert publish(pods) == [("a", f"deleted {5 * SECOND}")]
    assert (pods.expire(time_ns=905 * SECOND - 1), due(pods)) == (0, [])
    assert (pods.expire(time_ns=905 * SECOND), publish(pods)) == (0, [("a", "tombstone")])
    assert (pods.expire(time_ns=9999 * SECOND), due(pods), len(pods)) == (0, [], 0)


def test_a_tombstone_waits_until_its_deletion_is_published() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.delete(record("a"), time_ns=0)
    pods.expire(time_ns=9 * SECOND)
    assert publish(pods) == [("a", "deleted 0")]
    pods.expire(time_ns=9 * SECOND)
    assert publish(pods) == [("a", "tombstone")]


def test_a_list_deletes_pods_that_it_does_not_contain() -> None:
    pods = table()
    for uid in ("a", "b", "c"):
        pods.upsert(record(uid), time_ns=1)
    publish(pods)
    pods.begin_list()
    pods.upsert(record("b", version="9"), time_ns=2)
    assert pods.end_list(time_ns=3) == 2
    assert sorted(due(pods)) == [("a", "deleted 3"), ("c", "deleted 3")]


def test_a_pod_missing_from_a_list_is_deleted_with_the_lists_version() -> None:
    """That version is above those of the pod's records, so no late record can revive the pod."""
    pods = table()
    pods.restore([record("a", version="5")])
    pods.begin_list()
    pods.end_list(time_ns=3, version="100")
    (gone,) = pods.batch(MOST)
    assert gone.record is not None
    assert (gone.record.resource_version, gone.record.deleted_time_ns) == ("100", 3)


def test_a_pod_that_reappears_after_a_list_gets_at_least_that_lists_version() -> None:
    """Otherwise its record would seem older than its deletion."""
    pods = table()
    pods.upsert(record("a", version="5"), time_ns=1)
    pods.begin_list()
    pods.end_list(time_ns=2, version="100")
    pods.upsert(record("a", version="5"), time_ns=3)
    (lives,) = pods.batch(MOST)
    assert lives.record is not None
    assert (lives.record.resource_version, lives.record.deleted_time_ns) == ("100", None)
    pods.upsert(record("a", version="101", phase="Failed"), time_ns=4)
    assert [one.record and one.record.resource_version for one in pods.batch(MOST)] == ["101"]


def test_a_pod_to_be_repeated_is_due_as_it_was_restored() -> None:
    pods = table()
    pods.restore([record("a"), deleted("b", 7), record("c")])
    pods.repeat(["a", "b"], time_ns=9)
    assert publish(pods) == [("a", "Running"), ("b", f"deleted {7 * SECOND}")]


def test_an_interrupted_list_deletes_nothing_and_hides_nothing() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    pods.upsert(record("b"), time_ns=1)
    publish(pods)
    pods.begin_list()
    pods.upsert(record("a"), time_ns=2)
    pods.begin_list()
    assert due(pods) == []
    pods.upsert(record("b"), time_ns=3)
    assert pods.end_list(time_ns=4) == 1
    assert due(pods) == [("a", "deleted 4")]


def test_deleted_pods_beyond_the_limit_expire_early_and_are_counted() -> None:
    pods = table(max_tombstones=2)
    for uid in ("a", "b", "c"):
        pods.delete(record(uid), time_ns=1)
    publish(pods)
    assert pods.expire(time_ns=2) == 1
    assert publish(pods) == [("a", "tombstone")]
    assert pods.expire(time_ns=2) == 0


def test_a_pod_that_is_seen_again_after_its_deletion_is_alive() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.delete(record("a"), time_ns=1)
    pods.upsert(record("a"), time_ns=2)
    assert publish(pods) == [("a", "Running")]
    assert (pods.expire(time_ns=99 * SECOND), due(pods)) == (0, [])


def test_a_pod_that_the_topic_already_has_is_not_due_again() -> None:
    pods = table()
    pods.restore([record("a", version="1"), record("b")])
    pods.upsert(record("a", version="2"), time_ns=1)
    pods.upsert(record("b", phase="Succeeded"), time_ns=1)
    assert due(pods) == [("b", "Succeeded")]
    assert len(pods) == 2


def test_a_pod_on_the_topic_that_the_first_list_does_not_contain_is_deleted() -> None:
    pods = table()
    pods.restore([record("a"), record("b")])
    pods.begin_list()
    pods.upsert(record("b", version="9"), time_ns=2)
    assert pods.end_list(time_ns=3) == 1
    assert due(pods) == [("a", "deleted 3")]


def test_deleted_pods_on_the_topic_get_their_tombstone_at_their_time() -> None:
    pods = table(tombstone_after_seconds=10)
    pods.restore([deleted("late", 7), deleted("early", 1)])
    assert (due(pods), len(pods)) == ([], 0)
    pods.expire(time_ns=11 * SECOND)
    assert publish(pods) == [("early", "tombstone")]
    pods.expire(time_ns=17 * SECOND)
    assert publish(pods) == [("late", "tombstone")]


def test_a_pod_that_is_deleted_on_the_topic_is_alive_again_once_it_is_seen() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.restore([deleted("a", 1)])
    pods.upsert(record("a"), time_ns=2)
    assert publish(pods) == [("a", "Running")]
    assert (pods.expire(time_ns=99 * SECOND), due(pods)) == (0, [])


def test_the_last_of_equal_records_is_kept_unless_the_other_is_being_published() -> None:
    pods = table()
    pods.restore([record("a")])
    first, second = record("a", version="2"), record("a", version="3")
    pods.upsert(first, time_ns=1)
    pods.begin_list()
    pods.end_list(time_ns=2)
    assert due(pods) == [("a", "deleted 2")]
    assert pods.batch(MOST)[0].record.resource_version == "2"  # type: ignore[union-attr]  # it is no tombstone
    pods.upsert(first, time_ns=3)
    on_the_way = pods.batch(MOST)
    pods.upsert(second, time_ns=4)
    pods.acknowledge(on_the_way)
    assert due(pods) == []


def deleted(uid: str, seconds: int) -> PodRecord:
    return pod_record(uid, deleted_time_ns=seconds * SECOND)
