"""From records the stage makes events, attributed incidents and dead letters."""

import base64
from typing import Any

import orjson
import pytest

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Record, Unreadable, UnreadableReason
from gpuledger.codec import Decoder, encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.records import (
    AttributedIncident,
    ContainerRef,
    GpuEvent,
    Incident,
    IncidentProcess,
    PodState,
    Severity,
)
from gpuledger.records.bounds import MAX_CONTAINERS, MAX_INTERVAL_NS
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import (
    ATTRIBUTED_INCIDENTS,
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    PODS,
    PROCESSES,
    PROGRESS,
    SAMPLES,
    TOPICS,
)
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.builders import Given, value_of
from tests.unit.enricher.join.incidents import incident, incident_record
from tests.unit.enricher.join.ticks import (
    CONTAINER_IDS,
    UIDS,
    anywhere,
    pod,
    process,
    process_end,
    reading,
    record,
    sample,
)

EVENT = Decoder(topic=EVENTS.name, record=GpuEvent)
USED = sample(processes=[process(container=0, sm_utilization_ratio=0.5)])


@pytest.fixture
def dead_letters() -> DeadLetterQueue:
    return DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )


@pytest.fixture
def stage(dead_letters: DeadLetterQueue) -> JoinStage:
    return JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)


def pod_record(number: int = 0, **changes: object) -> Record:
    """Return a pod's record as it is read from the pods topic."""
    return record(pod(number, **changes), topic=PODS.name, key=f"default/{UIDS[number]}")


def event_of(messages: list[Message]) -> GpuEvent:
    """Return the only event among the messages."""
    assert len(messages) == 1
    return EVENT.decode(messages[0].value)


def test_an_event_names_the_pods_of_its_entries(stage: JoinStage) -> None:
    """Namespace, name, owner, labels and container names come from the pod's record."""
    stage.take_pods([pod_record()])
    event = event_of(stage.take_samples([record(USED)]))
    described = event.pods[0]
    assert described.state is PodState.KNOWN
    assert (described.namespace, described.name) == ("research", "train-0")
    assert (described.owner_kind, described.owner_name) == ("Job", "train")
    assert [(container.pod, container.name) for container in event.containers[:1]] == [(0, "main")]
    assert described.labels == {"team": "vision"}


def test_an_event_has_the_timestamp_that_the_broker_accepted_for_its_tick(stage: JoinStage) -> None:
    """A tick that claims to be of another century must not make an event that no broker accepts."""
    tick = record(sample(time_ns=2**63 - 1))
    (event,) = stage.take_samples([tick])
    assert event.timestamp_ms == tick.timestamp_ms


def test_an_unknown_pod_is_emitted_at_once_and_named_when_its_record_comes(
    stage: JoinStage,
) -> None:
    """The entries stay the same; only the description changes from pending to known."""
    before = event_of(stage.take_samples([record(USED)]))
    stage.take_pods([pod_record()])
    later = sample(seq=2000, processes=USED.processes)
    after = event_of(stage.take_samples([record(later, offset=1)]))
    assert (before.pods[0].uid, before.pods[0].state) == (UIDS[0], PodState.PENDING)
    assert (after.pods[0].uid, after.pods[0].state) == (UIDS[0], PodState.KNOWN)
    assert before.gpus == after.gpus


FOUND_BY = [
    ("its container id, if the path shows no pod", None, CONTAINER_IDS[0], {}),
    ("its UID, if the container is not in its status yet", UIDS[0], "f" * 64, {}),
    ("the hash of a static pod", "a" * 32, None, {"config_hash": "a" * 32}),
]


@pytest.mark.parametrize(("case", "uid", "container_id", "changes"), FOUND_BY)
def test_a_pod_is_found_by_its_cgroup(
    stage: JoinStage, case: str, uid: str | None, container_id: str | None, changes: dict[str, Any]
) -> None:
    """Each way in which a path can name a pod leads to its record."""
    stage.take_pods([pod_record(**changes)])
    found = stage.pods.of("default").find(uid, container_id, node="node-a")
    assert found is not None, case
    assert found.record.uid == UIDS[0]


def test_a_tombstone_removes_a_pod(stage: JoinStage) -> None:
    """After it the pod is pending again."""
    stage.take_pods([pod_record(), record(None, topic=PODS.name, key=f"default/{UIDS[0]}")])
    assert len(stage.pods) == 0


def test_a_tombstone_of_another_partition_removes_no_pod(stage: JoinStage) -> None:
    """Writers of the topic can write to any partition, so the key by itself proves nothing."""
    elsewhere = record(None, topic=PODS.name, key=f"default/{UIDS[0]}")
    stage.take_pods([pod_record(), elsewhere._replace(partition=elsewhere.partition + 1)])
    assert len(stage.pods) == 1


def test_a_repeated_tick_is_booked_once(stage: JoinStage) -> None:
    """The watermark is kept by node and boot; another boot starts over."""
    assert len(stage.take_samples([record(USED), record(USED, offset=1)])) == 1
    rebooted = sample(boot_id="another", seq=1)
    assert len(stage.take_samples([record(rebooted, offset=2)])) == 1


def test_a_late_adjustment_of_an_ended_process_is_in_the_event_of_the_tick_that_reports_it(
    stage: JoinStage,
) -> None:
    """Its pod is described there; because it is part of the event, it comes exactly once."""
    stage.take_pods([pod_record(1)])
    before = value_of("gpuledger_join_late_adjustment_seconds_total")
    tick = record(sample(ended_processes=[process_end(container=1)]))
    event = event_of(stage.take_samples([tick]))
    assert event.late_adjustments is not None
    (adjustment,) = event.late_adjustments
    assert sum(entry.busy_ns or 0 for entry in adjustment.entries) == 0
    user = event.containers[adjustment.entries[0].container or 0]
    assert user.pod is not None
    assert event.pods[user.pod].name == "train-1"
    # Other tests may have counted before, so that the difference of the two sums is rounded.
    counted = value_of("gpuledger_join_late_adjustment_seconds_total") - before
    assert counted == pytest.approx(0.5)
    assert stage.take_samples([tick]) == []


def test_an_event_without_ended_processes_has_no_late_adjustments(stage: JoinStage) -> None:
    (message,) = stage.take_samples([record(USED)])
    assert b"late_adjustments" not in (message.value or b"")


def test_the_state_of_a_partition_is_forgotten_with_it(stage: JoinStage) -> None:
    """Its pods and watermarks: another worker has them now."""
    stage.take_pods([pod_record()])
    stage.take_samples([record(USED)])
    stage.forget(3)
    assert len(stage.pods) == 0
    assert len(stage.take_samples([record(USED)])) == 1


MANY_CONTAINERS = [ContainerRef(container_id=f"{number:0250}") for number in range(MAX_CONTAINERS)]


INSTANCE = reading(uuid="MIG-a", parent_uuid="GPU-a", gpu_instance=1)
NAMED = ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])
OF_A_POD = ContainerRef(pod_uid=UIDS[0])
OF_NO_POD = ContainerRef(container_id=CONTAINER_IDS[0])
OTHER = ContainerRef(pod_uid=UIDS[1], container_id=CONTAINER_IDS[1])
REPEATED: list[tuple[str, dict[str, Any]]] = [
    ("field gpus[1].uuid: duplicate UUID 'GPU-a'", {"gpus": [reading(), reading(index=1)]}),
    ("field gpus[2].uuid: duplicate UUID 'MIG-a'", {"gpus": [reading(), INSTANCE, INSTANCE]}),
    (
        "field gpus[1].uuid: duplicate UUID 'GPU-a'",
        {"gpus": [reading(), reading(unresponsive=True)]},
    ),
    ("field containers[2]: duplicate container", {"containers": [NAMED, OTHER, NAMED]}),
    ("field containers[1]: duplicate container", {"containers": [OF_A_POD, OF_A_POD]}),
    ("field containers[1]: duplicate container", {"containers": [OF_NO_POD, OF_NO_POD]}),
]


def altered(**fields: object) -> bytes:
    """Return a tick as bytes, with fields that our encoder would not write."""
    return orjson.dumps(orjson.loads(encode(sample())) | fields)


BROKEN = [
    (altered(seq=2**63 - 1), "undecodable"),
    (altered(interval_ns=MAX_INTERVAL_NS + 1), "undecodable"),
    (altered(interval_ns=2**63 - 1), "undecodable"),
    (altered(node=""), "undecodable"),
    (altered(node="n" * 10_240), "undecodable"),
    (altered(boot_id="b" * 10_240), "undecodable"),
    (b"{", "undecodable"),
    (None, "undecodable"),
    (sample(seq=1, interval_ns=0), "invalid"),
    (sample(seq=1, containers=MANY_CONTAINERS), "too_large"),
    (altered(containers=[["c"]] * (MAX_CONTAINERS + 1)), "undecodable"),
    (encode(sample(seq=1))[:-1] + b" " * MAX_MESSAGE_BYTES + b"}", "too_large"),
    (sample(seq=1, processes=[process(gpu=1)]), "invalid"),
    (encode(sample(processes=[process(pid=77)])).replace(b"[0,77,", b"[-1,77,"), "undecodable"),
    (sample(seq=1, processes=[process(container=8)]), "invalid"),
    (sample(seq=1, ended_processes=[process_end(gpu=1)]), "invalid"),
    (sample(seq=1, ended_processes=[process_end(container=8)]), "invalid"),
    *((sample(seq=1, **changes), "invalid") for _, changes in REPEATED),
]


@pytest.mark.parametrize(("value", "reason"), BROKEN)
async def test_a_tick_that_cannot_be_booked_is_rejected_and_the_next_is_booked(
    value: object, reason: str
) -> None:
    """The dead letter has the reason and the original bytes."""
    producer = KeepingProducer()
    dead_letters = DeadLetterQueue(
        consumer="test", producer=producer, partitions=1, topic=DEAD_LETTERS
    )
    events = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS).take_samples(
        [record(value), record(USED, offset=1)]
    )
    await dead_letters.flush()
    (dead_letter,) = [orjson.loads(message.value or b"") for message in producer.messages()]
    assert len(events) == 1
    assert dead_letter["reason"] == reason
    assert (dead_letter["partition"], dead_letter["offset"]) == (3, 0)


@pytest.mark.parametrize(("output", "changes"), REPEATED)
async def test_the_dead_letter_of_a_tick_with_a_duplicate_names_its_place(
    output: str, changes: dict[str, Any]
) -> None:
    given = Given()
    assert not given.offer(**changes)
    (dead_letter,) = await given.rejected_records()
    assert output in dead_letter.detail


def test_containers_that_differ_in_pod_or_id_are_distinct() -> None:
    """A cgroup may show only one of the two; containers with neither are the host's."""
    anonymous = ContainerRef()
    given = Given()
    given.take(containers=[NAMED, OF_A_POD, OF_NO_POD, anonymous, anonymous, OTHER])


def test_an_incident_names_the_pods_that_were_on_the_gpu(stage: JoinStage) -> None:
    """A process of the host adds none."""
    stage.take_pods([pod_record()])
    incident = Incident(
        cluster="default",
        node="node-a",
        boot_id="boot",
        gpu_uuid="GPU-a",
        time_ns=1,
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        message="The GPU has fallen off the bus.",
        processes=[
            IncidentProcess(pid=1, pod_uid=UIDS[0], container_id=CONTAINER_IDS[0]),
            IncidentProcess(pid=2, command="nvidia-persiste"),
        ],
    )
    (message,) = stage.take_incidents([record(incident, topic=INCIDENTS.name)])
    decoder = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)
    found = decoder.decode(message.value)
    assert found.incident == incident
    assert [each.name for each in found.pods] == ["train-0"]


UNREADABLE = Record(
    SAMPLES.name, 3, 9, 0, None, None, Unreadable(5, UnreadableReason.DAMAGED, "no zstd")
)


async def test_an_unreadable_batch_of_any_topic_becomes_a_dead_letter_and_removes_nothing() -> None:
    producer = KeepingProducer()
    dead_letters = DeadLetterQueue(
        consumer="test", producer=producer, partitions=1, topic=DEAD_LETTERS
    )
    stage = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    stage.take_pods([pod_record(), UNREADABLE._replace(topic=PODS.name)])
    stage.restore_progress([UNREADABLE._replace(topic=PROGRESS.name)])
    stage.take_processes([UNREADABLE._replace(topic=PROCESSES.name)])
    assert stage.take_incidents([UNREADABLE._replace(topic=INCIDENTS.name)]) == []
    assert (
        len(stage.take_samples([record(USED), UNREADABLE, record(sample(seq=10_000), offset=10)]))
        == 2
    )
    assert len(stage.pods) == 1
    await dead_letters.flush()
    output = [orjson.loads(message.value or b"") for message in producer.messages()]
    assert [(each["topic"], each["offset"], each["last_offset"]) for each in output] == [
        (topic, 5, 9)
        for topic in (PODS.name, PROGRESS.name, PROCESSES.name, INCIDENTS.name, SAMPLES.name)
    ]
    assert {each["reason"] for each in output} == {"unreadable"}


async def test_an_incident_that_becomes_too_large_is_rejected_and_the_next_is_published() -> None:
    producer = KeepingProducer()
    dead_letters = DeadLetterQueue(
        consumer="test", producer=producer, partitions=1, topic=DEAD_LETTERS
    )
    processes = [IncidentProcess(pid=pid, container_id=f"{pid:0200}") for pid in range(4_000)]
    large, small = incident(processes=processes), incident()
    reported = JoinStage(
        dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS
    ).take_incidents([incident_record(large), incident_record(small)._replace(offset=1)])
    await dead_letters.flush()
    (dead_letter,) = [orjson.loads(message.value or b"") for message in producer.messages()]
    assert len(reported) == 1
    assert (dead_letter["reason"], dead_letter["offset"]) == ("too_large", 0)
    assert "the attributed incident of 'default/node-a' is too large: " in dead_letter["detail"]
    assert base64.b64decode(dead_letter["key_base64"]) == b"default/node-a"
