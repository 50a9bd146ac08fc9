"""A fleet's plan, its records, and the messages for errors in a fleet file."""

import copy
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import UserError
from gpuledger.topics import Topics
from gpuledger_simulator.fleet.load import parse_fleet
from gpuledger_simulator.fleet.plan import FleetPlan, plan_fleet
from gpuledger_simulator.fleet.records import FleetRecords

BEGIN_NS = 1_790_812_800 * 10**9
POOLS = """
- {name: whole, cluster: a, nodes: 2, model: NVIDIA L4, gpus: 2}
- {name: sliced, cluster: a, nodes: 1, model: NVIDIA L4, gpus: 1, sharing: time-slicing}
- {name: memory, cluster: b, nodes: 1, model: NVIDIA L4, gpus: 1, sharing: memory}
- {name: mig, cluster: b, nodes: 1, model: NVIDIA A100-SXM4-80GB, gpus: 1, mig: [3g.40gb, 1g.10gb]}
"""
WORKLOADS = """
- {name: a, namespace: a, kind: Job, team: x, pool: whole, pods: 3, units: 2}
- {name: b, namespace: a, kind: Job, team: x, pool: whole, pods: 2}
- {name: c, namespace: c, kind: Job, team: y, pool: sliced, pods: 5}
- {name: d, namespace: c, kind: Job, team: y, pool: memory, pods: 3, units: 9}
- {name: e, namespace: e, kind: Job, team: z, pool: mig, profile: 3g.40gb, pods: 2}
- {name: f, namespace: e, kind: Job, team: z, pool: mig, profile: 1g.10gb}
"""
TURNOVER: dict[str, Any] = {"run_hours": [0.2, 3], "pause_hours": [0.1, 1], "memory_gib": 2}
GOOD: dict[str, Any] = {
    "name": "good",
    "pools": yaml.safe_load(POOLS),
    "workloads": [each | TURNOVER for each in yaml.safe_load(WORKLOADS)],
    "lost_gpus": [
        {"pool": "whole", "node": 1, "gpu": 0, "at": 0.2, "hours": 5},
        {"pool": "mig", "node": 0, "gpu": 0, "at": 0.7, "hours": 20},
    ],
    "flaky_nodes": [{"pool": "whole", "node": 0, "xids": [48, 63], "per_day": 20}],
    "cordoned_nodes": [{"pool": "whole", "node": 1, "at": 0.6, "hours": 4}],
}


def planned(seed: int) -> FleetPlan:
    return plan_fleet(parse_fleet({**GOOD, "seed": seed}), begin_ns=BEGIN_NS, days=1)


@given(seed=st.integers(min_value=0, max_value=10**6))
def test_a_slot_belongs_to_at_most_one_pod_at_a_time(seed: int) -> None:
    plan = planned(seed)
    spans = defaultdict(list)
    for pod in plan.pods:
        for device, numbers in pod.slots:
            for number in numbers:
                spans[pod.node, device, number].append((pod.start, pod.end))
    assert len(spans) > 10
    for each in spans.values():
        each.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(each))


@given(seed=st.integers(min_value=0, max_value=10**6))
def test_no_pod_runs_on_a_node_that_is_restarted_or_starts_on_a_lost_gpu(seed: int) -> None:
    for pod in planned(seed).pods:
        assert pod.start < pod.end
        for loss in pod.node.losses:
            assert pod.end <= loss.restart or loss.back <= pod.start
            if any(pod.node.devices[each.device].gpu.index == loss.gpu for each in pod.slots):
                assert not loss.start <= pod.start < loss.restart


@given(seed=st.integers(min_value=0, max_value=10**6))
def test_no_pod_starts_on_a_cordoned_node(seed: int) -> None:
    plan = planned(seed)
    assert sum(bool(node.cordons) for node in plan.nodes) == 1
    assert not any(pod.node.is_cordoned(pod.start) for pod in plan.pods)


@given(seed=st.integers(min_value=0, max_value=10**6))
def test_a_pod_is_never_busy_beyond_its_part_of_a_device(seed: int) -> None:
    plan = planned(seed)
    for pod in plan.pods:
        slots = pod.slots[0]
        part = len(slots.numbers) / pod.node.devices[slots.device].slots
        assert 0 <= plan.busy_ppm(pod, pod.start // 60) <= part * 10**6
        truth = plan.truth(pod)
        assert truth.used_ns + truth.unresponsive_ns <= truth.allocated_ns


@given(seed=st.integers(min_value=0, max_value=10**6))
def test_a_pod_waits_only_while_no_node_has_room(seed: int) -> None:
    plan = planned(seed)
    waits = [
        *((pod.created, pod.start) for pod in plan.pods if pod.workload.name == "a"),
        *((pod.created, plan.minutes) for pod in plan.waiting if pod.workload.name == "a"),
    ]
    for created, start in waits:
        for minute in {created, *(other.end for other in plan.pods)}:
            if not created <= minute < start:
                continue
            for node in plan.nodes:
                is_closed = node.is_down(minute) or node.is_cordoned(minute)
                if node.pool.name == "whole" and not is_closed:
                    taken = {
                        each.device
                        for other in plan.pods_of[node]
                        if other.start <= minute < other.end
                        for each in other.slots
                    }
                    lost = {gpu for gpu in range(2) if node.is_lost(gpu, minute)}
                    assert taken | lost
    assert any(created < start for created, start in waits)


def test_xids_end_the_pods_of_their_gpu() -> None:
    plan = planned(3)
    assert {xid.node.name for xid in plan.xids} == {"whole-0"}
    ended = [pod for xid in plan.xids for pod in xid.pods if pod.end == xid.minute]
    assert ended
    assert len(ended) == sum(len(xid.pods) for xid in plan.xids)


def test_the_same_fleet_gives_the_same_records() -> None:
    first, second = (FleetRecords(planned(5), topics=Topics()).of_day(0) for _ in range(2))
    assert [each.message for each in first] == [each.message for each in second]
    assert [each.time_ns for each in first] == sorted(each.time_ns for each in first)
    assert first != FleetRecords(planned(6), topics=Topics()).of_day(0)


MISTAKES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(sed=2), "the file: unknown field 'sed'; did you mean 'seed'?"),
    (
        lambda c: c["pools"][0].update(sharing="slices"),
        "pools[0].sharing: unknown value 'slices'; available: none, time-slicing, memory",
    ),
    (lambda c: c["pools"][1].update(name="whole"), "pools[1].name: duplicate name 'whole'"),
    (
        lambda c: c["pools"][3].update(sharing="memory"),
        "pools[3].sharing: memory is invalid with mig",
    ),
    (lambda c: c["pools"][3].update(mig=["9g.1gb"]), "pools[3].mig[0]: invalid value"),
    (
        lambda c: c["workloads"][0].update(pool="hole"),
        "workloads[0].pool: unknown pool 'hole'; did you mean 'whole'?",
    ),
    (lambda c: c["workloads"][0].update(units=3), "workloads[0].units: 3 is more than"),
    (lambda c: c["workloads"][3].update(units=30), "workloads[3].units: 30 is more than"),
    (
        lambda c: c["workloads"][5].update(profile="2g.20gb"),
        "workloads[5].profile: 2g.20gb is not a profile of pool mig; available: 1g.10gb, 3g.40gb",
    ),
    (lambda c: c["workloads"][1].update(busy=[0.9, 0.1]), "workloads[1].busy: 0.9 is above 0.1"),
    (
        lambda c: c["workloads"][0].update(grows_to=3),
        "workloads[0].grows_to: 3 is not more than pods: 3",
    ),
    (lambda c: c["workloads"][1].update(team="y"), "workloads[1].team: 'y' differs from team 'x'"),
    (
        lambda c: c["lost_gpus"][0].update(gpu=2),
        "lost_gpus[0].gpu: pool whole has no GPU 2; available: 0 to 1",
    ),
    (
        lambda c: c["flaky_nodes"][0].update(node=2),
        "flaky_nodes[0].node: pool whole has no node 2; available: 0 to 1",
    ),
    (
        lambda c: c["cordoned_nodes"][0].update(node=2),
        "cordoned_nodes[0].node: pool whole has no node 2; available: 0 to 1",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), MISTAKES)
def test_an_error_in_a_fleet_names_the_field_and_the_remedy(
    spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    content = copy.deepcopy(GOOD)
    spoil(content)
    with pytest.raises(UserError) as raised:
        parse_fleet(content)
    assert message in str(raised.value)
