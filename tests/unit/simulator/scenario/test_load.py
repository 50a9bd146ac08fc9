"""Scenario files: how they are read, and the messages for their errors."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuledger.errors import UserError
from gpuledger_simulator.scenario.load import load_scenario, parse_scenario

GOOD: dict[str, Any] = {
    "name": "good",
    "nodes": [{"name": "node-a", "gpus": {"model": "NVIDIA L4"}}],
    "pods": [
        {
            "namespace": "a",
            "name": "b",
            "node": "node-a",
            "end_seconds": 9,
            "containers": [
                {
                    "name": "c",
                    "processes": [{"command": "x", "gpus": [0], "memory_bytes": 12_000_000_000}],
                }
            ],
        }
    ],
}


def process(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["pods"][0]["containers"][0]["processes"][0]
    return found


def again(content: dict[str, Any], **changes: str | float) -> None:
    content["pods"].append({**copy.deepcopy(content["pods"][0]), **changes})


MISTAKES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(sped=2), "the file: unknown field 'sped'; did you mean 'speed'?"),
    (lambda c: c.update(speed=0), "speed: expected `float` > 0.0"),
    (lambda c: c.update(name="My Test"), "name: invalid value; names consist of lower-case"),
    (
        lambda c: c["nodes"][0].update(driver={"processes": "means"}),
        "processes: unknown value 'means'; available: windows, mean, newest, mean_of_used, zero",
    ),
    (
        lambda c: c.update(faults=[{"node": "gpu-node-1", "kind": "gone"}]),
        "faults[0].kind: unknown value 'gone'; available: lost, reset_required,",
    ),
    (
        lambda c: c["nodes"][0].update(driver={"process_row_bytes": 28}),
        "nodes[0].driver.process_row_bytes: unknown value 28; available: 24, 32",
    ),
    (
        lambda c: c["nodes"][0].update(driver={"version": "580.95.05 (beta)"}),
        "nodes[0].driver.version: invalid driver version; use numbers separated by dots",
    ),
    (lambda c: c["nodes"][0].update(driver={"version": "5." + "8" * 78}), "length <= 79"),
    (
        lambda c: c["nodes"][0].update(driver={"process_row_bytes": 32}),
        "nodes[0].driver.process_row_bytes: 32 requires a driver from 535.43 to 535.86",
    ),
    (
        lambda c: c["nodes"][0].update(driver={"version": "535.87", "process_row_bytes": 32}),
        "but driver.version is 535.87",
    ),
    (
        lambda c: c["nodes"][0].update(gpus={"model": "NVIDIA L4", "memory_bytes": 1 << 63}),
        "memory_bytes: expected `int` <=",
    ),
    (lambda c: c.pop("nodes"), "the file: object missing required field `nodes`"),
    (
        lambda c: c["nodes"][0]["gpus"].update(modell=1),
        "nodes[0].gpus: unknown field 'modell'; did you mean 'model'?",
    ),
    (lambda c: c["nodes"][0]["gpus"].update(count="2"), "nodes[0].gpus.count: expected `int`"),
    (lambda c: c["nodes"].append(c["nodes"][0]), "nodes[1].name: duplicate name 'node-a'"),
    (
        lambda c: c["pods"][0].update(node="nod-a"),
        "pods[0].node: unknown node 'nod-a'; did you mean 'node-a'?",
    ),
    (
        lambda c: c["pods"][0].update(end_seconds=1, start_seconds=2),
        "pods[0].end_seconds: 1.0 is not after start_seconds 2.0",
    ),
    (
        lambda c: process(c).update(load={"busy_ration": 1}),
        "processes[0].load: unknown field 'busy_ration'; did you mean 'busy_ratio'?",
    ),
    (lambda c: process(c).update(load={"busy_ratio": 50}), "load.busy_ratio: expected `float` <="),
    (
        lambda c: process(c).update(gpus=[1]),
        "a/b 'x': gpus: node-a has no GPU 1; available: 0 to 0",
    ),
    (lambda c: process(c).update(memory_bytes=1 << 40), "a/b 'x': memory_bytes: GPU 0 of node-a"),
    (lambda c: again(c, name="d"), "memory_bytes"),
    (
        lambda c: again(c, start_seconds=5, end_seconds=20),
        "pods[1].name: a/b is still running at 5.0 s",
    ),
    (lambda c: c["pods"][0]["containers"].append({"name": "c"}), "duplicate name in c, c"),
    (
        lambda c: process(c).update(visits={"length_seconds": 2, "count": 2}),
        "a/b 'x': visits.every_seconds: 1.0 must be greater than length_seconds 2.0",
    ),
    (
        lambda c: process(c).update(visits={"first_seconds": 10, "length_seconds": 2}),
        "a/b 'x': visits.first_seconds: the process ends before",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "message_part"), MISTAKES, ids=[message_part for _, message_part in MISTAKES]
)
def test_an_error_is_reported_with_its_place_and_its_remedy(
    spoil: Callable[[dict[str, Any]], object], message_part: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(GOOD)
    spoil(content)
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as raised:
        load_scenario(file)
    message = str(raised.value)
    assert message.startswith(f"{file}: ")
    assert message_part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "message_part"),
    [("{", "invalid YAML"), ("", "expected `object`, got `null`"), (None, "No such file")],
)
def test_a_file_that_is_not_a_scenario_is_reported_in_one_line(
    content: str | None, message_part: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as raised:
        load_scenario(file)
    assert message_part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_scenario_without_errors_is_valid() -> None:
    assert parse_scenario(GOOD).pods[0].containers[0].processes[0].load.busy_ratio == 0.5


def test_a_name_may_be_reused_after_its_pod_has_ended() -> None:
    content = copy.deepcopy(GOOD)
    again(content, start_seconds=11, end_seconds=20)
    assert len(parse_scenario(content).pods) == 2


@pytest.mark.parametrize("file", sorted(Path("scenarios").glob("*.yaml")), ids=str)
def test_every_shipped_scenario_is_valid(file: Path) -> None:
    assert load_scenario(file).name == file.stem


def test_the_quickstart_shows_sharing_and_turnover() -> None:
    scenario = load_scenario("scenarios/quickstart.yaml")
    on_gpu = [
        (pod.node, index, pod.start_seconds, pod.end_seconds)
        for pod in scenario.pods
        for container in pod.containers
        for process in container.processes
        for index in process.gpus
    ]
    assert (len(scenario.nodes), len(scenario.pods)) == (2, 6)
    at_start = [place[:2] for place in on_gpu if place[2] == 0]
    assert len(at_start) > len(set(at_start))  # a shared GPU
    ends = {place[:2]: place[3] for place in on_gpu if place[3] and place[3] < 20}
    assert any(20 > place[2] >= ends.get(place[:2], 99) for place in on_gpu)  # a turnover
