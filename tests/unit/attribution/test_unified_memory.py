"""GPUs that use the machine's memory: each process gets its own, and the sum is the machine's."""

import pytest

from gpuledger.records import GpuBooks, MemoryMethod
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import play
from tests.unit.owners import pod_of

EPOCH_NS = 1_795_000_000_000_000_000
GIB = 1 << 30
HELD = {"chat": 40 * GIB, "notebook": 3 * GIB}


def scenario(*, unified: bool = True) -> dict[str, object]:
    group = {"model": "NVIDIA GB10", "memory_bytes": 119 * GIB, "unified_memory": unified}
    return {
        "name": "unified",
        "nodes": [{"name": "spark", "gpus": group}],
        "pods": [
            {
                "namespace": "research",
                "name": name,
                "node": "spark",
                "containers": [
                    {
                        "name": "main",
                        "processes": [{"command": name, "gpus": [0], "memory_bytes": held}],
                    }
                ],
            }
            for name, held in HELD.items()
        ],
    }


def books_of(simulation: Simulation, clock: ManualClock) -> list[tuple[GpuBooks, dict[str, int]]]:
    """Return each tick's booked GPUs, and their memory by pod name, with that of idle."""
    names = {simulation.uid(pod): pod.spec.name for pod in simulation.pods}
    found = []
    for tick in play(simulation.node("spark"), clock, [1.0] * 5):
        (books,) = book_tick(tick.sample)
        memory: dict[str, int] = {}
        for entry in books.entries:
            uid = pod_of(entry, tick.sample)
            name = names[uid] if uid else str(entry.category)
            memory[name] = memory.get(name, 0) + (entry.memory_bytes or 0)
        found.append((books, memory))
    return found


def test_processes_get_the_memory_that_the_driver_lists_and_the_rest_is_idle() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(parse_scenario(scenario()), epoch_ns=EPOCH_NS, clock=clock)
    for books, memory in books_of(simulation, clock):
        assert memory == {**HELD, "idle": (119 - 43) * GIB}
        assert books.memory_method is MemoryMethod.UNIFIED
        reading = books.reading
        assert (reading.memory_total_bytes, reading.memory_unified) == (119 * GIB, True)
        assert (reading.memory_used_bytes, reading.memory_reserved_bytes) == (None, None)


@pytest.mark.parametrize("kind", ["own memory", "no meminfo"])
def test_memory_is_unified_only_if_the_gpu_has_none_and_the_machines_memory_is_known(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    content = scenario(unified=kind != "own memory")
    simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    procfs = simulation.node("spark").procfs
    read = procfs.read

    def without_meminfo(path: str) -> bytes:
        if path == "/proc/meminfo":
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(procfs, "read", without_meminfo)
    for books, memory in books_of(simulation, clock):
        assert books.reading.memory_unified is None
        if kind == "own memory":
            assert books.memory_method is MemoryMethod.MEASURED
            assert sum(memory.values()) == 119 * GIB
        else:
            assert books.memory_method is None
            assert not any(memory.values())
