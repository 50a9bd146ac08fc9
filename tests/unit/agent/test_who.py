"""Which processes are reported to have been on a GPU or on one of its instances."""

import pytest

from gpuledger.keys import NodeId
from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from tests.ticks import query_all
from tests.unit.simulator.mig_builders import EPOCH_NS, cut_simulation

Seen = tuple[Sampler, str, dict[str | None, int]]
"""The sampler, the GPU's UUID, and the GPU instances by profile."""


@pytest.fixture
def seen() -> Seen:
    clock = ManualClock(start_ns=EPOCH_NS)
    node = cut_simulation(clock).node("node-a")
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    clock.advance(2)
    answers, at = query_all(gpu), ClockReading.read(node.clock)
    sampler.sample([answers], at=at)
    found = [instance.instance for instance in answers.instances if instance.instance]
    return sampler, gpu.uuid, {one.profile: one.gpu_instance or 0 for one in found}


def on(seen: Seen, gpu_instance: int | None) -> list[str | None]:
    sampler, uuid, _ = seen
    return [process.command for process in sampler.processes_on(uuid, gpu_instance)]


def test_processes_on_any_instance_are_on_the_gpu(seen: Seen) -> None:
    assert on(seen, None) == ["infer", "train", "notebook"]


@pytest.mark.parametrize(
    ("profile", "command"),
    [("1g.10gb", "infer"), ("3g.40gb", "train"), ("1c.2g.20gb", "notebook")],
)
def test_an_incident_of_an_instance_concerns_the_processes_in_it(
    seen: Seen, profile: str, command: str
) -> None:
    assert on(seen, seen[2][profile]) == [command]


def test_if_the_instance_is_not_known_all_processes_may_be_concerned(seen: Seen) -> None:
    assert len(on(seen, 99)) == 3


def test_another_gpu_has_none_of_these_processes(seen: Seen) -> None:
    assert seen[0].processes_on("GPU-other", None) == []
