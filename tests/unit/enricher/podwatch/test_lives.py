"""Podwatch decodes the lifetimes of pods and their containers, and their priority."""

import itertools

import pytest

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import PodRecord
from tests.default_topics import PODS
from tests.unit.enricher.podwatch.builders import (
    CREATED_NS,
    Object,
    encoded,
    hex_id,
    pod,
    reader_of,
)

SECOND = 10**9


def read(item: Object) -> PodRecord:
    found = reader_of().read(encoded(item))
    assert found is not None
    return found


def at(second: int) -> str:
    return f"2026-11-21T08:00:{second:02d}Z"


def after(second: int) -> int:
    return CREATED_NS + second * SECOND


def running(began: int) -> Object:
    return {"state": {"running": {"startedAt": at(began)}}}


def ended(container_id: str, began: int, end: int) -> Object:
    return {
        "terminated": {
            "exitCode": 1,
            "startedAt": at(began),
            "finishedAt": at(end),
            "containerID": f"containerd://{hex_id(container_id)}",
        }
    }


def container(container_id: str, **more: object) -> Object:
    found: Object = {
        "name": "main",
        "containerID": container_id and f"containerd://{hex_id(container_id)}",
    }
    return found | {"restartCount": 0} | more


@pytest.mark.parametrize(
    ("conditions", "scheduled_time_ns"),
    [
        (None, None),
        ([{"type": "Ready", "status": "True", "lastTransitionTime": at(9)}], None),
        ([{"type": "PodScheduled", "status": "False", "lastTransitionTime": at(1)}], None),
        ([{"type": "PodScheduled", "status": "True"}], None),
        (
            [
                {"type": "Ready", "status": "True", "lastTransitionTime": at(9)},
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(3)},
            ],
            after(3),
        ),
    ],
)
def test_a_pod_is_scheduled_when_its_condition_becomes_true(
    conditions: list[Object] | None, scheduled_time_ns: int | None
) -> None:
    found = read(pod(status={"conditions": conditions}))

    assert found.scheduled_time_ns == scheduled_time_ns


WAITING: Object = {"waiting": {"reason": "CrashLoopBackOff"}}
NO_TIMES: Object = {"terminated": {"startedAt": None, "finishedAt": None, "exitCode": 137}}
EPOCH: Object = {"running": {"startedAt": "1970-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param(container("c1"), ("c1", None, None, None), id="no state"),
        pytest.param(container("c1", state=WAITING), ("c1", None, None, None), id="waiting"),
        pytest.param(
            container("c1", **running(5)), ("c1", after(5), None, None), id="running at first"
        ),
        pytest.param(
            container("c1", state=ended("c1", 5, 9)), ("c1", after(5), after(9), None), id="ended"
        ),
        pytest.param(
            container("c2", **running(12), lastState=ended("c1", 5, 9)),
            ("c2", after(12), None, "c1"),
            id="running again",
        ),
        pytest.param(
            container("c2", state=ended("c2", 12, 20), lastState=ended("c1", 5, 9)),
            ("c2", after(12), after(20), "c1"),
            id="ended again",
        ),
        pytest.param(
            container("c1", state=WAITING, lastState=ended("c1", 5, 9)),
            ("c1", after(5), after(9), None),
            id="waiting to restart, with the last id",
        ),
        pytest.param(
            container("", state=WAITING, lastState=ended("c1", 5, 9)),
            (None, None, None, "c1"),
            id="waiting, without an id",
        ),
        pytest.param(container("c1", state=NO_TIMES), ("c1", None, None, None), id="no times"),
        pytest.param(container("c1", state=EPOCH), ("c1", None, None, None), id="time zero"),
        pytest.param(
            container("c1", state=None, lastState=None), ("c1", None, None, None), id="nulls"
        ),
    ],
)
def test_a_containers_lifetime_is_that_of_its_newest_id(
    status: Object, expected: tuple[str | None, int | None, int | None, str | None]
) -> None:
    (found,) = read(pod(status={"containerStatuses": [status]})).containers
    life = found.container_id, found.started_time_ns, found.ended_time_ns
    newest, began_ns, ended_ns, previous = expected
    ids = newest and hex_id(newest), previous and hex_id(previous)
    assert (*life, found.previous_container_id) == (ids[0], began_ns, ended_ns, ids[1])


RUNNING, SHORT, LONG = running(1), {"state": ended("a", 1, 9)}, {"state": ended("b", 1, 20)}
DELETED = at(30)


@pytest.mark.parametrize(
    ("phase", "deletion", "states", "expected"),
    [
        ("Succeeded", None, [SHORT, LONG], after(20)),
        ("Failed", None, [LONG, SHORT], after(20)),
        ("Failed", DELETED, [SHORT], after(9)),
        ("Failed", None, [SHORT, RUNNING], None),
        ("Failed", None, [SHORT, {"state": NO_TIMES}], None),
        ("Failed", None, [SHORT, {"containerID": ""}], after(9)),
        ("Failed", None, [], None),
        ("Running", None, [SHORT, LONG], None),
        ("Running", DELETED, [SHORT, LONG], after(20)),
        ("Running", DELETED, [SHORT, RUNNING], None),
        ("Pending", DELETED, [], None),
    ],
)
def test_a_pod_has_ended_when_none_of_its_containers_will_run_again(
    phase: str, deletion: str | None, states: list[Object], expected: int | None
) -> None:
    names = (f"c{number}" for number in itertools.count())
    statuses = [container("id", **state) | {"name": next(names)} for state in states]
    found = read(
        pod(
            metadata={"deletionTimestamp": deletion},
            status={"phase": phase, "containerStatuses": statuses},
        )
    )
    assert found.ended_time_ns == expected
    assert found.deletion_time_ns == (after(30) if deletion else None)


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        ({}, {}, (None, None, None)),
        (
            {"priority": 1000, "priorityClassName": "training"},
            {"qosClass": "Guaranteed"},
            ("Guaranteed", 1000, "training"),
        ),
        ({"priority": -5, "priorityClassName": ""}, {"qosClass": ""}, (None, -5, None)),
        ({"priority": 0, "priorityClassName": None}, {"qosClass": None}, (None, 0, None)),
    ],
)
def test_a_pods_priority_is_kept(
    spec: Object, status: Object, expected: tuple[str | None, int | None, str | None]
) -> None:
    found = read(pod(spec=spec, status=status))
    assert (found.qos_class, found.priority, found.priority_class) == expected


@pytest.mark.parametrize("time", ["yesterday", "2026-11-21T08:00:00", "2026-11-21", 5])
def test_an_invalid_time_makes_the_pod_unreadable(time: object) -> None:
    with pytest.raises(UndecodableError):
        read(pod(metadata={"deletionTimestamp": time}))


def test_a_time_too_late_for_a_record_becomes_the_latest_time_of_a_record() -> None:
    found = read(pod(metadata={"deletionTimestamp": "2318-01-01T00:00:00Z"}))
    assert found.deletion_time_ns == 2**63 - 1
    decoder = Decoder(topic=PODS.name, record=PodRecord)
    assert decoder.decode(encode(found)).deletion_time_ns == 2**63 - 1


def test_times_of_pods_in_the_same_second_are_shared_in_memory() -> None:
    reader = reader_of()
    first, second = (reader.read(encoded(pod(uid))) for uid in ("a", "b"))
    assert first is not None
    assert second is not None
    assert first.created_time_ns is second.created_time_ns
