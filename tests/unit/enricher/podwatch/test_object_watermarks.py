"""Podwatch's watermarks are true, whatever changes, fails or is interrupted."""

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.records import PodRecord
from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.events import Interrupted, Phase
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.table import ObjectTable, ObjectWatermarks
from tests.unit.enricher.podwatch.builders import PatientClock, pod_record

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 9)),
        st.tuples(st.just("send"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.integers(0, 2)),
        st.tuples(st.just("pass"), st.integers(1, 6)),
    ),
    max_size=80,
)


def table() -> ObjectTable[PodRecord]:
    return ObjectTable(
        tombstone_after_seconds=60,
        max_tombstones=9,
        node_of=POD.node_of,
        identity_of=POD.identity_of,
    )


@given(steps=STEPS)
def test_everything_seen_by_the_time_of_a_watermark_was_published(
    steps: list[tuple[str, int]],
) -> None:
    """In that state or a newer one; in batches of three, and some fail."""
    pods, clock = table(), PatientClock()
    message = ObjectWatermarks(table=pods, clock=clock)
    message.follow(Phase.LISTED)
    seen: list[tuple[int, str, int]] = []
    published: dict[str, int] = {}
    for number, (step, value) in enumerate(steps, start=1):
        if step == "change":
            uid = f"u{value}"
            pods.upsert(
                pod_record(uid, resource_version=str(number), phase=f"phase-{number}"),
                time_ns=clock.time_ns(),
            )
            seen.append((clock.time_ns(), uid, number))
            clock.advance(0.001)
        elif step == "pass":
            clock.advance(value)
        else:
            message.begin()
            batch = pods.batch(3)
            arrived = batch if step == "send" else batch[:value]
            for each in arrived:
                assert each.record is not None
                published[each.identity] = int(each.record.resource_version)
            pods.acknowledge(arrived)
            if step == "send":
                message.acknowledge(batch)
            else:
                message.reset()
        if (until_ns := message.complete_until_ns()) is not None:
            for time_ns, uid, version in seen:
                assert time_ns > until_ns or published.get(uid, 0) >= version
            message.record_published()


def test_no_watermark_is_published_before_the_first_list_or_without_an_api_server() -> None:
    clock = PatientClock()
    message = ObjectWatermarks(table=table(), clock=clock)
    for step in (Phase.LISTING, Interrupted(KubernetesError("away"))):
        message.follow(step)
        clock.advance(60)
        message.begin()
        assert message.complete_until_ns() is None
    message.follow(Phase.LISTED)
    message.begin()
    assert message.complete_until_ns() == clock.time_ns()


def test_the_watermark_is_renewed_every_few_seconds_and_no_more_often() -> None:
    clock = PatientClock()
    message = ObjectWatermarks(table=table(), clock=clock)
    message.follow(Phase.LISTED)
    times = []
    for _ in range(21):
        message.begin()
        if (until_ns := message.complete_until_ns()) is not None:
            times.append(until_ns)
            message.record_published()
        clock.advance(1)
    assert len(times) == 5


def test_a_resumed_watch_gets_time_to_bring_what_it_missed() -> None:
    clock = PatientClock()
    message = ObjectWatermarks(table=table(), clock=clock)
    message.follow(Phase.LISTED)
    message.record_published()
    message.follow(Interrupted(KubernetesError("away")))
    clock.advance(60)
    message.follow(Phase.WATCHING)
    message.begin()
    assert message.complete_until_ns() is None
    clock.advance(6)
    message.begin()
    assert message.complete_until_ns() == clock.time_ns()
