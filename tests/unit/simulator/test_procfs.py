"""The played /proc shows the processes that run now."""

import re

import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import Simulation


def pid_of(simulation: Simulation, command: str) -> int:
    return next(p.pid for p in simulation.processes if p.spec.command.startswith(command))


UID = "[0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12}"
ID = "[0-9a-f]{64}"
SLICE = r"0::/kubepods\.slice"
SHAPES = {
    "/opt/bin/train": rf"{SLICE}/kubepods-pod{UID}\.slice/cri-containerd-{ID}\.scope\n",
    "serve": (
        rf"{SLICE}/kubepods-burstable\.slice/kubepods-burstable-pod{UID}\.slice"
        rf"/cri-containerd-{ID}\.scope\n"
    ),
    "render": rf"(\d+:[a-z,=]+:/kubepods/besteffort/pod{UID}/{ID}\n){{6}}",
    "burn": r"0::/system\.slice/ssh\.service\n",
}


@pytest.mark.parametrize("command", SHAPES)
def test_a_cgroup_path_has_the_form_of_its_node_and_its_pods_class(
    simulation: Simulation, clock: ManualClock, command: str
) -> None:
    clock.advance(3)
    (process,) = [p for p in simulation.processes if p.spec.command.startswith(command)]
    content = simulation.node(process.node).procfs.read(f"/proc/{process.pid}/cgroup")
    assert re.fullmatch(SHAPES[command], content.decode())


def test_the_path_has_the_pods_uid_and_the_containers_id(simulation: Simulation) -> None:
    pod = simulation.pods[0]
    pid = pid_of(simulation, "/opt/bin/train")
    content = simulation.node("node-a").procfs.read(f"/proc/{pid}/cgroup").decode()
    assert simulation.uid(pod).replace("-", "_") in content
    assert pod.container_ids["main"] in content


def test_stat_has_the_start_in_ticks_since_boot_after_a_name_with_parentheses(
    simulation: Simulation,
) -> None:
    pid = pid_of(simulation, "render")
    stat = simulation.node("node-b").procfs.read(f"/proc/{pid}/stat").decode()
    before, _, after = stat.rpartition(") ")
    fields = after.split()
    assert before == f"{pid} (re) S 1 (nder"
    assert fields[0] == "S"
    assert len(fields) == 50  # man 5 proc: 52 fields, two of them before
    assert int(fields[22 - 3]) == 18_000 * 100


def test_the_start_of_a_process_matches_the_nodes_clock(
    simulation: Simulation, clock: ManualClock
) -> None:
    clock.advance(5)
    node = simulation.node("node-a")
    stat = node.procfs.read(f"/proc/{pid_of(simulation, 'serve')}/stat").decode()
    started_seconds = int(stat.rpartition(") ")[2].split()[19]) / 100
    assert node.clock.boottime_ns() / 1e9 - started_seconds == 3


@pytest.mark.parametrize("seconds", [0, 1.99, 8.25, 100])
def test_a_process_has_no_files_before_its_start_and_after_its_end(
    simulation: Simulation, clock: ManualClock, seconds: float
) -> None:
    clock.advance(seconds)
    with pytest.raises(FileNotFoundError):
        simulation.node("node-a").procfs.read(f"/proc/{pid_of(simulation, 'serve')}/comm")


@pytest.mark.parametrize("path", ["/proc/1/cgroup", "/proc/x/stat", "/proc/2", "/etc/passwd"])
def test_other_files_do_not_exist(simulation: Simulation, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        simulation.node("node-a").procfs.read(path)


def test_the_kernels_name_is_the_programs_name_cut_to_fifteen_bytes(simulation: Simulation) -> None:
    pid = pid_of(simulation, "/opt/bin/train")
    assert simulation.node("node-a").procfs.read(f"/proc/{pid}/comm") == b"train\n"
