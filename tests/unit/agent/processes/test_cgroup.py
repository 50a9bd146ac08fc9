"""Which container and pod a cgroup path names: real paths of many runtimes, and the rules."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.processes.cgroup import Location, locate

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parents[4] / "tests" / "data" / "cgroup-vectors.jsonl")
    .read_text()
    .splitlines()
]
UID = "9953f715-6c55-3eb2-99f1-cc88e6816fce"
POD = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"
OUTER, INNER = "a" * 64, "b" * 64


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["shape"] for vector in VECTORS])
def test_every_known_shape_gives_its_container_and_pod(vector: dict[str, Any]) -> None:
    found = locate(vector["line"])
    assert (found.container_id, found.pod_uid) == (vector["container_id"], vector["pod_uid"])
    assert found.line == vector["line"]


def test_the_vectors_are_all_there() -> None:
    assert len(VECTORS) == 44


@pytest.mark.parametrize(
    ("law", "path", "container_id", "pod_uid"),
    [
        ("docker in a pod is the pod's container", f"/{POD}/{OUTER}/docker/{INNER}", OUTER, UID),
        ("a pod in a container is the inner pod", f"/docker/{OUTER}/{POD}/{INNER}", INNER, UID),
        ("the last pod wins", f"/pod{'1' * 32}/{OUTER}/{POD}/{INNER}", INNER, UID),
        ("an outer container is not the pod's", f"/docker/{OUTER}/{POD}", None, UID),
        ("the first of nested containers", f"/docker/{OUTER}/docker/{INNER}", OUTER, None),
        ("nerdctl", f"/system.slice/nerdctl-{OUTER}.scope", OUTER, None),
        ("a mount is no container", f"/system.slice/{OUTER}.mount", None, None),
        ("a podman pod is no pod", f"/machine.slice/libpod_pod_{OUTER}.slice", None, None),
        ("65 digits are no id", f"/docker/{OUTER}a", None, None),
        ("capital digits are no id", f"/docker/{OUTER.upper()}", None, None),
        ("a removed cgroup", f"/{POD}/cri-containerd-{OUTER}.scope (deleted)", OUTER, UID),
        ("CRI-O in colon form", f"/system.slice/{POD}:crio:{OUTER}", OUTER, UID),
    ],
)
def test_a_path_is_read_by_whole_segments(
    law: str, path: str, container_id: str | None, pod_uid: str | None
) -> None:
    found = locate(f"0::{path}")
    assert (found.container_id, found.pod_uid) == (container_id, pod_uid), law


def test_in_a_hybrid_file_the_line_with_the_pod_wins() -> None:
    pod = f"0::/docker/{OUTER}/kubelet.slice/{POD}/cri-containerd-{INNER}.scope"
    found = locate(f"12:memory:/docker/{OUTER}\n1:name=systemd:/docker/{OUTER}\n{pod}\n")
    assert found == Location(container_id=INNER, pod_uid=UID, line=pod)


def test_of_two_lines_with_the_pod_the_one_with_the_container_wins() -> None:
    lines = [f"1:name=systemd:/{POD}", f"7:freezer:/{POD}/{INNER}"]
    assert locate(lines).container_id == INNER


def test_of_equal_lines_the_usual_controllers_win() -> None:
    lines = [f"9:blkio:/docker/{OUTER}", f"5:memory:/docker/{INNER}", f"6:pids:/docker/{OUTER}"]
    assert locate(lines).line == lines[1]


def test_a_host_process_is_told_by_its_first_line() -> None:
    found = locate("3:cpu,cpuacct:/\n1:name=systemd:/user.slice\n")
    assert found == Location(line="3:cpu,cpuacct:/")
    assert not found.in_container


def test_the_readers_own_container_shows_nothing_in_a_private_namespace() -> None:
    assert locate("0::/\n") == Location(line="0::/")


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_no_line_is_no_place(text: str) -> None:
    assert locate(text) == Location()
