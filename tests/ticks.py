"""Ticks as the agent makes them, without its loop: the GPUs are asked, the answers sampled."""

from collections.abc import Sequence

from agent.nvml.answers import LastSeen
from agent.nvml.gpu import Gpu
from agent.nvml.library import Nvml
from agent.sampling import Moment, Sampler, Tick
from gpuledger.clock import Clock
from simulator.clock import HandClock
from simulator.simulation import SimulatedNode


def tick_of(sampler: Sampler, gpus: Sequence[Gpu], clock: Clock) -> Tick | None:
    """Ask the GPUs now and give the tick; none where it is the first, which only opens counters."""
    asked_ns, seen = clock.boottime_ns(), sampler.last_seen()
    answers = [gpu.answer(seen.get(gpu.uuid, LastSeen())) for gpu in gpus]
    return sampler.sample(answers, asked_boottime_ns=asked_ns, at=Moment.read(clock))


def play(node: SimulatedNode, clock: HandClock, lengths: Sequence[float]) -> list[Tick]:
    """Give a played node's ticks of these lengths, in seconds."""
    sampler = Sampler(node=node.name, procfs=node.procfs)
    gpus = Nvml(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    for seconds in [0.0, *lengths]:
        clock.advance(seconds)
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick)
    return made
