"""Which pods the table has due, and for how long."""

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
    """Return what is due, as UID and state."""
    return [(one.identity, _state(one.record)) for one in pods.batch(MOST)]


def _state(found: PodRecord | None) -> str:
    if found is None:
        return "tombstone"
    return found.phase if found.deleted_time_ns is None else f"deleted {found.deleted_time_ns}"


def publish(pods: ObjectTable) -> list[tuple[str, str]]:
    """Acknowledge what is due, and return what it was."""
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


def test_a_pod_that_differs_in_its_version_alone_is_not_due_again() -> None:
    pods = table()
    pods.upsert(record("a", version="1"), time_ns=1)
    publish(pods)
    pods.upsert(record("a", version="2"), time_ns=2)
    assert due(pods) == []
    pods.upsert(record("a", version="3", phase="Succeeded"), time_ns=3)
    assert due(pods) == [("a", "Succeeded")]


def test_a_newer_state_takes_the_place_of_one_that_waits() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    pods.upsert(record("a", phase="Failed"), time_ns=2)
    assert due(pods) == [("a", "Failed")]


def test_what_changes_while_it_is_published_stays_due() -> None:
    pods = table()
    pods.upsert(record("a"), time_ns=1)
    on_the_way = pods.batch(MOST)
    pods.upsert(record("a", phase="Failed"), time_ns=2)
    pods.acknowledge(on_the_way)
    assert due(pods) == [("a", "Failed")]


def test_a_batch_holds_no_more_than_asked_for_the_longest_known_first() -> None:
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


def test_a_tombstone_waits_for_its_deletion_to_be_known() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.delete(record("a"), time_ns=0)
    pods.expire(time_ns=9 * SECOND)
    assert publish(pods) == [("a", "deleted 0")]
    pods.expire(time_ns=9 * SECOND)
    assert publish(pods) == [("a", "tombstone")]


def test_a_list_deletes_what_it_did_not_have() -> None:
    pods = table()
    for uid in ("a", "b", "c"):
        pods.upsert(record(uid), time_ns=1)
    publish(pods)
    pods.begin_list()
    pods.upsert(record("b", version="9"), time_ns=2)
    assert pods.end_list(time_ns=3) == 2
    assert sorted(due(pods)) == [("a", "deleted 3"), ("c", "deleted 3")]


def test_what_a_list_did_not_have_is_deleted_as_of_the_lists_version() -> None:
    """Which is above that of each record of it: none that comes late can make it live again."""
    pods = table()
    pods.restore([record("a", version="5")])
    pods.begin_list()
    pods.end_list(time_ns=3, version="100")
    (gone,) = pods.batch(MOST)
    assert gone.record is not None
    assert (gone.record.resource_version, gone.record.deleted_time_ns) == ("100", 3)


def test_a_pod_that_lives_in_spite_of_a_list_does_so_from_that_lists_version_on() -> None:
    """Or its record would be taken for one from before its deletion."""
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


def test_what_is_to_be_repeated_is_due_as_it_was_restored() -> None:
    pods = table()
    pods.restore([record("a"), deleted("b", 7), record("c")])
    pods.repeat(["a", "b"], time_ns=9)
    assert publish(pods) == [("a", "Running"), ("b", f"deleted {7 * SECOND}")]


def test_a_list_that_broke_off_deletes_nothing_and_hides_nothing() -> None:
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


def test_deleted_pods_beyond_the_bound_are_buried_early_and_counted() -> None:
    pods = table(max_tombstones=2)
    for uid in ("a", "b", "c"):
        pods.delete(record(uid), time_ns=1)
    publish(pods)
    assert pods.expire(time_ns=2) == 1
    assert publish(pods) == [("a", "tombstone")]
    assert pods.expire(time_ns=2) == 0


def test_a_pod_seen_again_after_its_deletion_lives() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.delete(record("a"), time_ns=1)
    pods.upsert(record("a"), time_ns=2)
    assert publish(pods) == [("a", "Running")]
    assert (pods.expire(time_ns=99 * SECOND), due(pods)) == (0, [])


def test_what_the_topic_knows_already_is_not_due_again() -> None:
    pods = table()
    pods.restore([record("a", version="1"), record("b")])
    pods.upsert(record("a", version="2"), time_ns=1)
    pods.upsert(record("b", phase="Succeeded"), time_ns=1)
    assert due(pods) == [("b", "Succeeded")]
    assert len(pods) == 2


def test_what_the_topic_knows_and_the_first_list_does_not_have_is_deleted() -> None:
    pods = table()
    pods.restore([record("a"), record("b")])
    pods.begin_list()
    pods.upsert(record("b", version="9"), time_ns=2)
    assert pods.end_list(time_ns=3) == 1
    assert due(pods) == [("a", "deleted 3")]


def test_deleted_pods_of_the_topic_get_their_tombstone_in_their_time() -> None:
    pods = table(tombstone_after_seconds=10)
    pods.restore([deleted("late", 7), deleted("early", 1)])
    assert (due(pods), len(pods)) == ([], 0)
    pods.expire(time_ns=11 * SECOND)
    assert publish(pods) == [("early", "tombstone")]
    pods.expire(time_ns=17 * SECOND)
    assert publish(pods) == [("late", "tombstone")]


def test_a_pod_that_the_topic_takes_for_deleted_lives_once_it_is_seen() -> None:
    pods = table(tombstone_after_seconds=1)
    pods.restore([deleted("a", 1)])
    pods.upsert(record("a"), time_ns=2)
    assert publish(pods) == [("a", "Running")]
    assert (pods.expire(time_ns=99 * SECOND), due(pods)) == (0, [])


def test_of_equal_records_the_last_seen_is_kept_unless_the_other_is_on_its_way() -> None:
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
