"""Ticks as the agent makes them and events as the join makes them, without their loops."""

from collections.abc import Sequence
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.keys import NodeId
from gpuledger.records import EventContainer, GpuEvent, NodeSample
from gpuledger_agent.core.fast_polls import FastPollPlan
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.core.raw import CallGroup, ClockReading, RawGpuSample, SampleCursor
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import SimulatedNode

FAST_POLL_PAUSE_NS: Final = NS_PER_SECOND // 10
_FROM_THE_START: Final = SampleCursor()


def tick_gpu(
    gpu: GpuSampler, raw: RawGpuSample, *, now_ns: int, interval_ns: int = NS_PER_SECOND
) -> GpuTick:
    """Make a tick of one GPU at a time of the monotonic clock."""
    at = ClockReading(time_ns=10**18 + now_ns, monotonic_ns=now_ns, boottime_ns=now_ns)
    return gpu.tick(raw, at=at, interval_ns=interval_ns)


def query_all(gpu: NvidiaGpu, cursor: SampleCursor = _FROM_THE_START) -> RawGpuSample:
    """Return the values of all groups of a GPU; raise SourceLostError if it is lost."""
    values: dict[str, Any] = {}
    for group in CallGroup:
        values |= gpu.query(group, cursor)
    return RawGpuSample(uuid=gpu.uuid, index=gpu.index, **values)


def tick_of(sampler: Sampler, gpus: Sequence[NvidiaGpu], clock: Clock) -> NodeTick | None:
    """Query the GPUs now and return the tick; `None` for the first, which only starts counters."""
    at, seen = ClockReading.read(clock), sampler.begin_tick()
    answers = [query_all(gpu, seen.get(gpu.uuid, SampleCursor())) for gpu in gpus]
    return sampler.sample(answers, at=at)


def take_fast_polls(
    sampler: Sampler, gpus: Sequence[NvidiaGpu], clock: ManualClock, node_clock: Clock, tick_ns: int
) -> None:
    """Advance by a tick's length, with fast polls in between as in the agent's loop."""
    begin_ns = clock.monotonic_ns()
    plan = FastPollPlan(
        begin_ns=begin_ns,
        end_ns=begin_ns + tick_ns,
        lag_ns=sampler.lag_ns,
        pause_ns=FAST_POLL_PAUSE_NS,
    )
    while poll_time := plan.next(
        clock.monotonic_ns(), is_close=bool(sampler.watched_closely(clock.monotonic_ns()))
    ):
        clock.advance((poll_time.at_ns - clock.monotonic_ns()) / NS_PER_SECOND)
        at = ClockReading.read(node_clock)
        cursors = sampler.fast_poll_cursors(poll_time.others, now_ns=at.monotonic_ns)
        requested = [gpu for gpu in gpus if gpu.uuid in cursors]
        sampler.take_fast_polls([gpu.fast_poll(cursors[gpu.uuid], at=at) for gpu in requested])
    clock.advance((plan.end_ns - clock.monotonic_ns()) / NS_PER_SECOND)


def play(node: SimulatedNode, clock: ManualClock, lengths: Sequence[float]) -> list[NodeTick]:
    """Return a played node's ticks of these lengths, in seconds."""
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    for seconds in [0.0, *lengths]:
        take_fast_polls(sampler, gpus, clock, node.clock, round(seconds * NS_PER_SECOND))
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick)
    return made


def event_of(sample: NodeSample) -> GpuEvent:
    """Return the booked event of a tick, like the join's before it has read any pod."""
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
        allocations=[],
    )
