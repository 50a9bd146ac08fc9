"""Which version of a pod counts, whatever the order of its records.

A podwatch leader that was stopped in the middle of a batch may send the rest of it while another
one leads, and so write an older version after a newer one.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.records import PodContainer, PodRecord
from gpuledger_enricher.join.pods.pods import PodCache
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.publish import KnownRecords
from gpuledger_enricher.watched_records import is_older
from tests.default_topics import PODS, TOPICS
from tests.unit.enricher.join.ticks import pod

UID = pod().uid
TOMBSTONE = None
Read = PodRecord | None


def at(version: str, **changes: object) -> PodRecord:
    return pod(0, **{"resource_version": version, "labels": {"version": version}, **changes})


def cached(reported: Sequence[Read]) -> PodCache:
    """Return a join's pods after these records of one pod."""
    cache = PodCache()
    for number, one in enumerate(reported):
        if one is TOMBSTONE:
            cache.remove(UID, partition=0, time_ns=number)
        else:
            cache.put(one, partition=0, seen_time_ns=number)
    return cache


KEY = f"default/{UID}".encode()


def newest(reported: Sequence[Read]) -> PodRecord | None:
    found = cached(reported).find(UID, None, node="node-a")
    return found.record if found else None


def read_back(reported: Sequence[Read]) -> KnownRecords:
    """Return what a starting podwatch reads from these records."""
    known = KnownRecords(cluster="default", kind=POD, topics=TOPICS)
    known.ingest(
        Record(
            PODS.name, 0, number, 0, f"default/{UID}".encode(), None if one is None else encode(one)
        )
        for number, one in enumerate(reported)
    )
    return known


VERSIONS = [
    ("5", "6", True),
    ("6", "5", False),
    ("5", "5", False),
    ("9", "10", True),
    ("10", "9", False),
    ("9" * 5000, "1" + "0" * 5000, True),
    ("5", "v6", False),
    ("v5", "6", False),
    ("", "6", False),
    ("05", "6", False),
    ("-5", "6", False),
    ("\u0665", "6", False),
]


@pytest.mark.parametrize(("version", "than", "older"), VERSIONS)
def test_versions_are_compared_if_they_are_decimal_integers(
    version: str, than: str, older: object
) -> None:
    assert is_older(at(version), than=at(than)) is older


GONE = at("8", deleted_time_ns=77)
OF_ONE_POD: list[tuple[str, list[Read], PodRecord | None]] = [
    ("the older version comes later", [at("5"), at("7"), at("6")], at("7")),
    ("a version from before its deletion comes later", [at("5"), GONE, at("6")], GONE),
    ("versions of another form count in the order they come", [at("b"), at("a")], at("a")),
    ("the same version again, as if two deletions are reported", [at("8"), GONE], GONE),
    # A UID is never reused, and its tombstone comes hours after its deletion: whoever sends a
    # tombstone, however late, is right. It has no version, and compaction obeys it.
    (
        "a stale tombstone deletes a pod that the next leader deletes too",
        [at("5"), GONE, TOMBSTONE],
        None,
    ),
    # After a compaction, the records before it are unknown. Until podwatch restarts and lists, the
    # pod seems to exist: it uses memory and describes whatever names it.
    ("a record after its tombstone counts", [GONE, TOMBSTONE, at("6")], at("6")),
]


@pytest.mark.parametrize(("case", "reported", "expected"), OF_ONE_POD)
def test_the_newest_version_of_a_pod_counts(
    case: str, reported: list[Read], expected: PodRecord | None
) -> None:
    assert newest(reported) == expected, case


reports_of_a_pod = st.lists(
    st.one_of(
        st.none(),
        st.builds(
            at,
            st.sampled_from(["3", "9", "10", "11", "x", "y"]),
            deleted_time_ns=st.sampled_from([None, 5, 7]),
        ),
    ),
    max_size=12,
)


@given(reports_of_a_pod)
def test_the_join_and_the_next_podwatch_agree_on_the_newest_record(
    reported: list[Read],
) -> None:
    """Podwatch publishes it again if an older one follows it."""
    known = read_back(reported)
    found, read = newest(reported), known.by_identity.get(UID)
    assert (read and encode(read)) == (found and encode(found))
    assert known.overtaken == ({UID} if found is not None and found != reported[-1] else set())


@given(st.permutations([at("3"), at("4"), at("10"), at("11", deleted_time_ns=5)]), st.data())
def test_the_order_of_records_does_not_matter(
    reported: list[PodRecord], data: st.DataObject
) -> None:
    """Neither do repetitions."""
    again = data.draw(st.lists(st.sampled_from(reported), max_size=3))
    assert newest([*reported, *again]) == at("11", deleted_time_ns=5)


def test_a_container_that_only_an_older_version_names_is_found() -> None:
    """It is an identity: whatever came before or after, it belonged to this pod."""
    named = [
        at(version, containers=[PodContainer(name="main", container_id=name, restarts=0)])
        for version, name in (("5", "first"), ("9", "third"), ("7", "second"))
    ]
    cache = cached(named)
    for name in ("first", "second", "third"):
        found = cache.find(None, name, node="node-a")
        assert found is not None
        assert found.record.resource_version == "9"
        assert found.container_name(name) == "main"


def test_an_outdated_version_is_never_in_force() -> None:
    """When it was in force is unknown: the versions before and after it cover that time."""
    found = cached([at("5"), at("9"), at("7")]).find(UID, None, node="node-a")
    assert found is not None
    assert [found.at(time).labels["version"] for time in (0, 1, 2)] == ["5", "9", "9"]
