"""From the largest ticks the join makes events that sinks accept, or a dead letter."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import Decoder, encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.ledger.entries import booked_entries
from gpuledger.ledger.series import values_of
from gpuledger.records import (
    AttributedIncident,
    ContainerRef,
    DeviceAllocation,
    GpuEvent,
    IncidentProcess,
    NodeSample,
)
from gpuledger.records.bounds import (
    MAX_ALLOCATIONS,
    MAX_CONTAINERS,
    MAX_ENDED_PROCESSES,
    MAX_GPUS,
    MAX_ID_LENGTH,
    MAX_INCIDENT_PROCESSES,
    MAX_PROCESSES,
    MAX_SENTENCE_LENGTH,
    MAX_WORD_LENGTH,
)
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import ATTRIBUTED_INCIDENTS, DEAD_LETTERS, EVENTS, TOPICS
from tests.examples import examples
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.builders import value_of
from tests.unit.enricher.join.incidents import incident, incident_record
from tests.unit.enricher.join.ticks import (
    SECOND_NS,
    anywhere,
    process,
    process_end,
    reading,
    record,
    sample,
)

EVENT = Decoder(topic=EVENTS.name, record=GpuEvent)
ATTRIBUTED = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)
PLAIN = {
    "memory_total_bytes": None,
    "memory_used_bytes": None,
    "memory_reserved_bytes": None,
    "energy_millijoules": None,
}


def allocated(number: int, **changes: Any) -> DeviceAllocation:  # noqa: ANN401 - as DeviceAllocation takes them
    values: dict[str, Any] = {
        "gpu_uuid": "GPU-a",
        "device_id": f"{number}",
        "resource_name": "r",
        "namespace": "n",
        "pod": f"p{number}",
        "container": "c",
    }
    return DeviceAllocation(**values | changes)


def containers(count: int) -> list[ContainerRef]:
    return [ContainerRef(container_id=f"{number}") for number in range(count)]


def instances(count: int, **changes: Any) -> list[Any]:  # noqa: ANN401 - as a reading takes them
    rows = [
        reading(uuid=f"MIG-{number}", parent_uuid="GPU-a", **{"gpu_instance": number} | changes)
        for number in range(count)
    ]
    return [reading(mig_enabled=True), *rows]


def largest() -> dict[str, NodeSample]:
    used = [process(container=place, pid=place) for place in range(MAX_CONTAINERS)]
    longest = [
        ContainerRef(
            container_id=f"{place:03}".ljust(MAX_ID_LENGTH, "c"),
            pod_uid="\U0001f600" * MAX_ID_LENGTH,
        )
        for place in range(500)
    ]
    return {
        "containers": sample(
            gpus=[reading(**PLAIN)], containers=containers(MAX_CONTAINERS), processes=used
        ),
        "processes": sample(
            containers=containers(2),
            processes=[
                process(container=number % 2, pid=number, started_boottime_ns=None)
                for number in range(MAX_PROCESSES)
            ],
        ),
        "allocations": sample(
            containers=[], allocations=[allocated(number) for number in range(MAX_ALLOCATIONS)]
        ),
        "gpus": sample(
            containers=[], gpus=[reading(uuid=f"GPU-{number}") for number in range(MAX_GPUS)]
        ),
        "instances that are each other's parents": sample(
            containers=[],
            gpus=instances(MAX_GPUS - 1),
            allocations=[allocated(number, gpu_instance=number) for number in range(MAX_GPUS)],
        ),
        "more allocations of each instance than a message can hold": sample(
            containers=[],
            gpus=instances(MAX_GPUS - 1, gpu_instance=1),
            allocations=[allocated(number, gpu_instance=1) for number in range(MAX_ALLOCATIONS)],
        ),
        "ends": sample(
            containers=[],
            ended_processes=[
                process_end(pid=number, container=None) for number in range(MAX_ENDED_PROCESSES)
            ],
        ),
        "long names": sample(
            gpus=[reading(uuid="G" * MAX_ID_LENGTH, model="\U0001f600" * MAX_WORD_LENGTH)],
            containers=longest,
            processes=[process(container=place, pid=place) for place in range(500)],
        ),
    }


def taken(value: object, take: Callable[[JoinStage], Sequence[Message]]) -> Sequence[Message]:
    """Return the messages made of a record, or nothing if it became one dead letter."""
    producer = KeepingProducer()
    dead_letters = DeadLetterQueue(
        consumer="test", producer=producer, partitions=1, topic=DEAD_LETTERS
    )
    made = take(JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS))
    assert len(made) + dead_letters.rejected == 1, value
    assert all(len(one.key or b"") + len(one.value or b"") <= MAX_MESSAGE_BYTES for one in made)
    return made


def events_of(tick: NodeSample) -> list[GpuEvent]:
    made = taken(tick, lambda stage: stage.take_samples([record(tick)]))
    return [EVENT.decode(one.value) for one in made]


@pytest.mark.parametrize("name", largest())
def test_the_event_of_a_tick_at_its_bounds_can_be_decoded_by_sinks(name: str) -> None:
    tick = largest()[name]
    assert len(encode(tick)) <= MAX_MESSAGE_BYTES

    events = events_of(tick)

    assert len(events) == (name != "more allocations of each instance than a message can hold")
    for event in events:
        assert len(values_of(event)) > 0
        assert sum(1 for _ in booked_entries(event)) >= len(event.gpus)


ids = st.none() | st.text(max_size=MAX_ID_LENGTH)
refs = st.builds(ContainerRef, container_id=ids, pod_uid=ids)


def named_by(container: ContainerRef) -> tuple[str, str]:
    """Return the identity of a container; no tick has the same one twice."""
    return container.pod_uid or "", container.container_id or ""


@given(found=st.lists(refs, max_size=20, unique_by=named_by), data=st.data())
@examples(50)
def test_the_event_of_any_valid_tick_is_valid(
    found: list[ContainerRef], data: st.DataObject
) -> None:
    places = st.none() | st.integers(0, len(found) - 1) if found else st.none()
    processes = [
        process(pid=pid, container=data.draw(places)) for pid in range(data.draw(st.integers(0, 9)))
    ]
    names = st.text(max_size=63)
    allocations = [
        allocated(number, namespace=data.draw(names), pod=data.draw(names))
        for number in range(data.draw(st.integers(0, 5)))
    ]
    times = st.integers(0, 2**63 - 1)
    ends = [
        process_end(container=data.draw(places), until_time_ns=data.draw(times))
        for _ in range(data.draw(st.integers(0, 3)))
    ]

    (event,) = events_of(
        sample(containers=found, processes=processes, allocations=allocations, ended_processes=ends)
    )

    for line in booked_entries(event):
        assert 0 <= event.time_ns - line.time_ns <= 25 * 3600 * SECOND_NS


@pytest.mark.parametrize("processes", [1_000, MAX_INCIDENT_PROCESSES])
@pytest.mark.parametrize("allocations", [0, 1_000])
def test_the_attributed_incident_of_an_incident_at_its_bounds_can_be_decoded_by_sinks(
    processes: int, allocations: int
) -> None:
    reported = incident(
        message="m" * MAX_SENTENCE_LENGTH,
        processes=[IncidentProcess(pid=one, container_id=f"{one}") for one in range(processes)],
        allocations=[allocated(number) for number in range(allocations)],
    )

    (made,) = taken(reported, lambda stage: stage.take_incidents([incident_record(reported)]))

    assert len(ATTRIBUTED.decode(made.value).pods) == processes + allocations


def test_an_incident_whose_processes_are_all_in_one_pod_can_be_decoded_by_sinks() -> None:
    reported = incident(
        processes=[
            IncidentProcess(pid=one, pod_uid="u", container_id=f"{one}")
            for one in range(MAX_INCIDENT_PROCESSES)
        ]
    )

    (made,) = taken(reported, lambda stage: stage.take_incidents([incident_record(reported)]))

    found = ATTRIBUTED.decode(made.value)
    assert len(found.pods) == 1
    assert found.process_pods == [0] * MAX_INCIDENT_PROCESSES


def test_an_unknown_kind_of_incident_is_counted_as_other() -> None:
    """A label value for each word in a record would make a series for each."""
    before = value_of("gpuledger_join_incidents_total", kind="other")
    reported = [incident_record(incident(kind=f"kind-{number}")) for number in range(3)]
    dead_letters = DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )

    made = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS).take_incidents(
        reported
    )

    assert value_of("gpuledger_join_incidents_total", kind="other") == before + 3
    assert [ATTRIBUTED.decode(one.value).incident.kind for one in made] == [
        "kind-0",
        "kind-1",
        "kind-2",
    ]


def test_a_record_larger_than_a_message_is_rejected_undecoded() -> None:
    """For example one of 8 MB in a handmade batch."""
    producer = KeepingProducer()
    dead_letters = DeadLetterQueue(
        consumer="test", producer=producer, partitions=1, topic=DEAD_LETTERS
    )
    huge = Record("t", 3, 0, 1, b"default/node-a", encode(sample())[:-1] + b" " * 8_000_000 + b"}")

    assert (
        JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS).take_samples([huge])
        == []
    )
    assert dead_letters.rejected == 1
