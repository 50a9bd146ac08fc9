"""The order of a pod's steps in the API server."""

from typing import Any

import pytest

from gpuledger_simulator.kube_objects import PodStep, pod_events
from gpuledger_simulator.plan import plan_pods
from gpuledger_simulator.scenario.load import parse_scenario

NODES = [{"name": "n", "gpus": {"model": "NVIDIA L4"}}]


def pod(**more: object) -> dict[str, Any]:
    return {"namespace": "a", "name": "p", "node": "n", "containers": [{"name": "c"}], **more}


def steps(*pods: dict[str, Any]) -> list[tuple[float, str, str]]:
    scenario = parse_scenario({"name": "s", "nodes": NODES, "pods": list(pods)})
    events = pod_events(plan_pods(scenario, epoch_ns=0))
    return [(event.at_ns / 1e9, event.pod.key, event.step.value) for event in events]


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        ({"kind": "Job", "name": "j"}, [(8, PodStep.FINISHED), (11, PodStep.DELETED)]),
        ({"kind": "StatefulSet", "name": "s"}, [(8, PodStep.TERMINATING), (8.5, PodStep.DELETED)]),
    ],
)
def test_a_finished_job_stays_for_a_while_and_a_service_is_terminated(
    owner: dict[str, str], expected: list[tuple[float, PodStep]]
) -> None:
    taken = steps(pod(owner=owner, start_seconds=5, end_seconds=8))
    assert taken == [
        (3.5, "a/p", "created"),
        (5, "a/p", "running"),
        *((at, "a/p", step.value) for at, step in expected),
    ]


def test_a_pod_without_an_end_stays() -> None:
    assert [step for _, _, step in steps(pod())] == ["created", "running"]


@pytest.mark.parametrize(
    ("start", "wait", "created", "scheduled"), [(30, 20, 8.5, 28.5), (3, 20, -6, 1.5)]
)
def test_a_pod_that_waits_is_created_without_a_node_and_scheduled_before_it_starts(
    start: float, wait: float, created: float, scheduled: float
) -> None:
    taken = steps(pod(start_seconds=start, wait_seconds=wait))

    assert taken == [
        (created, "a/p", "created"),
        (scheduled, "a/p", "scheduled"),
        (start, "a/p", "running"),
    ]


def test_a_reused_name_is_free_before_it_is_taken() -> None:
    taken = steps(pod(end_seconds=8), pod(start_seconds=8.4))
    assert taken[-3:] == [
        (8.4, "a/p", "deleted"),
        (8.4, "a/p#2", "created"),
        (8.4, "a/p#2", "running"),
    ]


def test_a_pod_hidden_from_the_api_server_has_no_steps() -> None:
    assert steps(pod(in_api=False)) == []
