"""The truth of a simulation: exact, complete, and the same in every process."""

import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation

SECOND = 1_000_000_000
GIB = 1 << 30


def test_the_usage_of_a_pod_is_the_sum_of_its_busy_intervals(
    simulation: Simulation, epoch_ns: int
) -> None:
    chat = next(p for p in simulation.processes if p.spec.command == "serve")
    gpu = simulation.node("node-a").gpus[1]
    start, end = 3 * SECOND + 1234, 7 * SECOND + 77
    spans = gpu.intervals(chat, end)
    busy_ns = sum(max(0, min(stop, end) - max(begin, start)) for begin, stop in spans)
    (usage,) = [
        u for u in simulation.truth(epoch_ns + start, epoch_ns + end) if u.owner_name == "chat"
    ]
    assert usage.busy_seconds == busy_ns / 1e9
    assert usage.memory_byte_seconds == pytest.approx(10 * GIB * (end - start) / 1e9)
    assert usage.joules == pytest.approx(busy_ns / 1e9 * (700 - 70))


def test_pods_and_host_together_used_no_more_than_the_devices_time(
    simulation: Simulation, epoch_ns: int
) -> None:
    start, end = 0, 12 * SECOND
    device_seconds = sum(
        gpu.device_busy_ns(start, end) / 1e9
        for node in simulation.nodes.values()
        for gpu in node.gpus
    )
    pods = simulation.truth(epoch_ns, epoch_ns + end)
    host = simulation.host_truth(epoch_ns, epoch_ns + end)
    used = sum(pod.busy_seconds for pod in pods) + host.busy_seconds
    assert used == pytest.approx(device_seconds)
    assert device_seconds <= 3 * 12


def test_adjacent_intervals_sum_to_the_whole(simulation: Simulation, epoch_ns: int) -> None:
    cut = epoch_ns + 4_321_000_777
    end = epoch_ns + 8 * SECOND
    parts = simulation.truth(epoch_ns, cut) + simulation.truth(cut, end)
    for whole in simulation.truth(epoch_ns, end):
        summed = sum(part.busy_seconds for part in parts if part.uid == whole.uid)
        assert summed == pytest.approx(whole.busy_seconds)


def test_a_process_on_two_gpus_uses_its_memory_on_both(
    simulation: Simulation, epoch_ns: int
) -> None:
    (train,) = [u for u in simulation.truth(epoch_ns, epoch_ns + SECOND) if u.owner_name == "train"]
    assert train.memory_byte_seconds == 2 * 40 * GIB
    assert train.busy_seconds > 1.5


def test_the_truth_of_a_node_has_only_its_own_pods(simulation: Simulation, epoch_ns: int) -> None:
    usage = simulation.truth(epoch_ns, epoch_ns + SECOND, node="node-b")
    assert [pod.pod for pod in usage] == ["render-1-xyz"]


def test_two_processes_with_the_same_scenario_and_epoch_have_the_same_simulation(
    simulation: Simulation, same_simulation: Simulation, epoch_ns: int
) -> None:
    for second in range(1, 12):  # one is queried often, the other once
        simulation.truth(epoch_ns, epoch_ns + second * SECOND)
    whole = epoch_ns, epoch_ns + 12 * SECOND
    assert simulation.truth(*whole) == same_simulation.truth(*whole)
    assert [p.pid for p in simulation.processes] == [p.pid for p in same_simulation.processes]


def test_another_epoch_is_another_run_on_the_same_hardware(
    simulation: Simulation, epoch_ns: int
) -> None:
    later = Simulation(simulation.scenario, epoch_ns=epoch_ns + 1)
    assert simulation.uid(simulation.pods[0]) != later.uid(later.pods[0])
    boot_id = "/proc/sys/kernel/random/boot_id"
    assert simulation.node("node-a").procfs.read(boot_id) != later.node("node-a").procfs.read(
        boot_id
    )
    assert simulation.node("node-a").gpus[0].facts == later.node("node-a").gpus[0].facts


def test_whole_percents_stay_within_one_percent_of_the_truth_in_the_end_to_end_scenario(
    epoch_ns: int,
) -> None:
    clock = ManualClock(start_ns=epoch_ns)
    simulation = Simulation(load_scenario("scenarios/e2e.yaml"), epoch_ns=epoch_ns, clock=clock)
    sampled = _sample_for_thirty_seconds(simulation, clock)
    for process in simulation.processes:
        gpus = simulation.node(process.node).gpus
        busy_ns = sum(
            gpu.busy_ns(process, 0, 30 * SECOND) for gpu in gpus if process in gpu.processes
        )
        # The window in which it ended or that is still open is missing from the samples.
        missing_seconds = 1 / 6 * len(process.spec.gpus)
        assert sampled[process.pid] == pytest.approx(busy_ns / 1e9, rel=0.005, abs=missing_seconds)


def _sample_for_thirty_seconds(simulation: Simulation, clock: ManualClock) -> dict[int, float]:
    """Add up the process samples like a reader that continues after its last one per device."""
    seconds: dict[int, float] = {}
    last_seen: dict[str, int] = {}
    for node in simulation.nodes.values():
        node.nvml.nvmlInit()
    for _ in range(10):
        clock.advance(3)
        for node in simulation.nodes.values():
            for index, gpu in enumerate(node.gpus):
                handle = node.nvml.nvmlDeviceGetHandleByIndex(index)
                newer_than = last_seen.get(gpu.facts.uuid, 0)
                samples = node.nvml.nvmlDeviceGetProcessUtilization(handle, newer_than)
                last_seen[gpu.facts.uuid] = max(sample.timeStamp for sample in samples)
                for sample in samples:
                    busy_seconds = sample.smUtil / 100 / 6
                    seconds[sample.pid] = seconds.get(sample.pid, 0.0) + busy_seconds
    return seconds
