"""The labels and the words of an incident's alert."""

from typing import Any

import pytest

from gpuledger.records import AttributedIncident, Incident, PodDescription, PodState, Severity
from sinks.alerts.incidents import annotations_of, labels_of


def taken(*pods: PodDescription, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    values: dict[str, Any] = {
        "node": "node-a",
        "boot_id": "boot-1",
        "gpu_uuid": "GPU-1",
        "time_ns": 5,
        "kind": "xid",
        "source": "nvml",
        "severity": Severity.CRITICAL,
        "xid": 79,
        "mnemonic": "GPU_HAS_FALLEN_OFF_THE_BUS",
        "category": "node",
        "action": "RESTART_BM",
        "message": "GPU has fallen off the bus",
        "processes": [],
    }
    return AttributedIncident(incident=Incident(**(values | changes)), pods=list(pods))


def test_an_alert_can_be_routed_by_class_and_severity_and_says_what_to_do() -> None:
    labels, words = labels_of(taken()), annotations_of(taken())

    assert (labels["category"], labels["severity"]) == ("node", "critical")
    assert words == {
        "summary": "XID 79 on node-a",
        "description": "GPU has fallen off the bus",
        "mnemonic": "GPU_HAS_FALLEN_OFF_THE_BUS",
        "action": "RESTART_BM",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"xid": 78},
        {"gpu_instance": 0},
        {"gpu_instance": 1},
        {"kind": "gpu_lost", "xid": None},
        {"gpu_uuid": "GPU-2"},
        {"node": "node-b"},
    ],
)
def test_another_thing_is_another_alert(changes: dict[str, Any]) -> None:
    assert labels_of(taken(**changes)) != labels_of(taken())


@pytest.mark.parametrize(
    "changes",
    [{"time_ns": 6}, {"source": "kmsg"}, {"message": "other words"}, {"action": "RESET_GPU"}],
)
def test_the_same_thing_told_otherwise_is_the_same_alert(changes: dict[str, Any]) -> None:
    assert labels_of(taken(**changes)) == labels_of(taken())


def test_who_holds_the_gpu_is_alerted_where_nobody_uses_it() -> None:
    """Whether the pod's record has come or only the kubelet has named it; all are in the words."""
    unnamed = PodDescription(uid="uid-9", container_ids=[], state=PodState.PENDING)
    holders = [
        PodDescription(container_ids=[], state=state, namespace="research", name=name)
        for name, state in (("notebook-0", PodState.PENDING), ("train-0", PodState.KNOWN))
    ]
    alerted = taken(unnamed, *holders)

    assert (labels_of(alerted)["namespace"], labels_of(alerted)["pod"]) == (
        "research",
        "notebook-0",
    )
    assert annotations_of(alerted)["pods"] == "uid-9, research/notebook-0, research/train-0"


def test_what_an_incident_does_not_say_is_neither_label_nor_word() -> None:
    bare = taken(kind="gpu_lost", xid=None, mnemonic=None, category=None, action=None)

    assert {name for name, value in labels_of(bare).items() if value} == {
        "alertname",
        "severity",
        "node",
        "gpu_uuid",
        "kind",
    }
    assert annotations_of(bare).keys() == {"summary", "description"}
