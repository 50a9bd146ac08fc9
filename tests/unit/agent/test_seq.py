"""A tick's number rises within a boot, whichever agent of the node made it."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.keys import NodeId
from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.sampling import Sampler
from tests.fakes.nvml import FakeProcfs

EPOCH_NS = 1_795_000_000_000_000_000
FIRST_TICK_NS = 10_000_000  # the shortest that the settings allow
TICK_NS = 250_000_000


def moment(boottime_ns: int, *, time_ns: int) -> ClockReading:
    return ClockReading(time_ns=time_ns, monotonic_ns=boottime_ns, boottime_ns=boottime_ns)


lives = st.lists(
    st.tuples(
        st.integers(0, 2_000_000).map(lambda gap_ns: gap_ns - gap_ns % 1000),
        st.integers(1, 5),
        st.integers(-(10**15), 10**15),
    ),
    min_size=1,
    max_size=6,
)


@given(lives=lives, first_tick_ns=st.integers(FIRST_TICK_NS, TICK_NS))
def test_seq_rises_across_restarts_within_a_millisecond_and_across_clock_steps(
    lives: Sequence[tuple[int, int, int]], first_tick_ns: int
) -> None:
    boottime_ns, seqs = 5_000_000_000, []
    for down_ns, ticks, set_by_ns in lives:
        boottime_ns += down_ns
        sampler = Sampler(node=NodeId("default", "node-1"), procfs=FakeProcfs())
        for number in range(ticks + 1):
            at = moment(boottime_ns, time_ns=EPOCH_NS + boottime_ns + set_by_ns)
            tick = sampler.sample([], at=at)
            seqs += [tick.sample.seq] if tick else []
            boottime_ns += (first_tick_ns if number == 0 else TICK_NS) if number < ticks else 0
    assert len(seqs) == sum(ticks for _, ticks, _ in lives)
    assert all(before < after for before, after in pairwise(seqs))
