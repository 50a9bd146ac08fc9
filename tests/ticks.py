"""Ticks as the agent makes them and events as the join does, without their loops."""

from collections.abc import Sequence

from agent.core.raw import SampleCursor
from agent.core.tick import ClockReading, NodeTick
from agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from agent.sampling import Sampler
from enricher.join.booking.books import book_tick
from gpuledger.clock import Clock
from gpuledger.keys import NodeId
from gpuledger.records import EventContainer, GpuEvent, NodeSample
from simulator.clock import ManualClock
from simulator.simulation import SimulatedNode


def tick_of(sampler: Sampler, gpus: Sequence[NvidiaGpu], clock: Clock) -> NodeTick | None:
    """Ask the GPUs now and give the tick; none where it is the first, which only opens counters."""
    at, seen = ClockReading.read(clock), sampler.last_seen()
    answers = [gpu.query_all(seen.get(gpu.uuid, SampleCursor())) for gpu in gpus]
    return sampler.sample(answers, at=at)


def play(node: SimulatedNode, clock: ManualClock, lengths: Sequence[float]) -> list[NodeTick]:
    """Return a played node's ticks of these lengths, in seconds."""
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    for seconds in [0.0, *lengths]:
        clock.advance(seconds)
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick)
    return made


def event_of(sample: NodeSample) -> GpuEvent:
    """Return a tick booked, as the join does before it has read of any pod."""
    return GpuEvent(
        cluster="default",
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=book_tick(sample),
        pods=[],
        containers=[EventContainer(container_id=one.container_id) for one in sample.containers],
        holders=[],
    )
