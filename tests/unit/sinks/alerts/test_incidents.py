"""The labels and texts of an incident's alert."""

from typing import Any

import pytest

from gpuledger.records import AttributedIncident, Incident, PodDescription, PodState, Severity
from gpuledger_sinks.alerts.incident_words import annotations_of, labels_of


def taken(*pods: PodDescription, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    values: dict[str, Any] = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot-1",
        "gpu_uuid": "GPU-1",
        "gpu_index": 3,
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


def test_an_alert_has_a_class_and_a_severity_for_routing_and_an_action() -> None:
    labels, words = labels_of(taken()), annotations_of(taken())

    assert (labels["category"], labels["severity"]) == ("node", "critical")
    assert words == {
        "summary": "GPU 3 on node node-a: XID 79, GPU has fallen off the bus",
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
        {"gpu_index": 2},
        {"node": "node-b"},
    ],
)
def test_an_incident_that_differs_is_another_alert(changes: dict[str, Any]) -> None:
    assert labels_of(taken(**changes)) != labels_of(taken())


@pytest.mark.parametrize(
    "changes",
    [{"time_ns": 6}, {"source": "kmsg"}, {"message": "other words"}, {"action": "RESET_GPU"}],
)
def test_the_same_incident_in_other_words_is_the_same_alert(changes: dict[str, Any]) -> None:
    assert labels_of(taken(**changes)) == labels_of(taken())


def test_the_alert_of_a_gpu_without_processes_names_the_pods_to_which_it_is_allocated() -> None:
    """Labels need the pod's record; texts name all pods."""
    unnamed = PodDescription(uid="uid-9", state=PodState.PENDING)
    holders = [
        PodDescription(state=state, namespace="research", name=name)
        for name, state in (("train-0", PodState.NAMED), ("notebook-0", PodState.KNOWN))
    ]
    alerted = taken(unnamed, *holders)

    assert (labels_of(alerted)["namespace"], labels_of(alerted)["pod"]) == (
        "research",
        "notebook-0",
    )
    assert annotations_of(alerted)["pods"] == "uid-9, research/train-0, research/notebook-0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "GPU 3 on node node-a: "),
        ({"gpu_instance": 9}, "GPU 3 instance 9 on node node-a: "),
        ({"gpu_index": None}, "GPU-1 on node node-a: "),
        ({"gpu_index": None, "gpu_uuid": "PCI:0000:3B:00"}, "GPU PCI:0000:3B:00 on node node-a: "),
    ],
)
def test_an_alert_shows_the_gpus_index_and_invents_none(
    changes: dict[str, Any], message: str
) -> None:
    reported = taken(**changes)
    assert annotations_of(reported)["summary"] == f"{message}XID 79, GPU has fallen off the bus"
    index = "" if reported.incident.gpu_index is None else "3"
    assert labels_of(reported)["gpu_index"] == index


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "(pod n/p-0)"),
        (2, "(pods n/p-0, n/p-1)"),
        (3, "(pods n/p-0, n/p-1, n/p-2)"),
        (40, "(pods n/p-0, n/p-1, n/p-2 and 37 more)"),
    ],
)
def test_the_summary_names_the_pods_and_remains_one_line_if_there_are_many(
    count: int, message: str
) -> None:
    pods = [
        PodDescription(state=PodState.KNOWN, namespace="n", name=f"p-{number}")
        for number in range(count)
    ]
    words = annotations_of(taken(*pods))
    assert words["summary"] == f"GPU 3 on node node-a {message}: XID 79, GPU has fallen off the bus"
    assert words["pods"].count(",") == count - 1


def test_a_missing_field_of_an_incident_is_neither_a_label_nor_in_the_texts() -> None:
    bare = taken(
        kind="gpu_lost", xid=None, mnemonic=None, category=None, action=None, gpu_index=None
    )

    assert {name for name, value in labels_of(bare).items() if value} == {
        "alertname",
        "severity",
        "cluster",
        "node",
        "gpu_uuid",
        "kind",
    }
    assert annotations_of(bare).keys() == {"summary", "description"}
