"""The time-slicing device: which kernel runs when."""

from itertools import pairwise

import pytest

from gpuledger_simulator.device import Kernels, Stream
from gpuledger_simulator.plan import NEVER_NS

MS = 1_000_000
SECOND = 1000 * MS


def stream(
    *,
    name: str = "a",
    busy_ratio: float = 0.5,
    kernel_ms: int = 10,
    start: int = 0,
    end: int = NEVER_NS,
) -> Stream:
    return Stream(visits=[(start, end)], kernel_ns=kernel_ms * MS, busy_ratio=busy_ratio, seed=name)


def device(*streams: Stream) -> Kernels:
    return Kernels(streams, time_slice_ns=2 * MS)


def intervals(*streams: Stream) -> list[tuple[int, int]]:
    return sorted(span for stream in streams for span in stream.busy.intervals())


def test_busy_intervals_of_a_device_never_overlap() -> None:
    streams = [stream(name=str(n), busy_ratio=0.3 + n / 5, kernel_ms=3 + n) for n in range(4)]
    device(*streams).run_until(20 * SECOND)
    spans = intervals(*streams)
    assert len(spans) > 1000
    assert all(sooner[1] <= later[0] for sooner, later in pairwise(spans))


def test_the_number_of_steps_does_not_change_the_result() -> None:
    at_once, in_steps = ([stream(name="a"), stream(name="b")] for _ in range(2))
    device(*at_once).run_until(5 * SECOND)
    stepped = device(*in_steps)
    for step in range(1, 1001):
        stepped.run_until(step * 5 * MS)
    assert intervals(*at_once) == intervals(*in_steps)


@pytest.mark.parametrize("busy_ratio", [0.05, 0.4, 0.9, 1.0])
def test_the_only_process_on_a_device_is_as_busy_as_its_load(busy_ratio: float) -> None:
    alone = stream(busy_ratio=busy_ratio)
    device(alone).run_until(120 * SECOND)
    assert alone.busy.until(120 * SECOND) / (120 * SECOND) == pytest.approx(busy_ratio, rel=0.03)


def test_processes_that_never_pause_get_equal_turns() -> None:
    streams = [stream(name=str(n), busy_ratio=1.0, kernel_ms=40) for n in range(3)]
    device(*streams).run_until(30 * SECOND)
    shares = [each.busy.until(30 * SECOND) / (30 * SECOND) for each in streams]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)


def test_kernels_run_only_while_their_process_lives() -> None:
    short = stream(busy_ratio=1.0, start=SECOND + 7, end=2 * SECOND + 11)
    device(stream(name="b", busy_ratio=0.2), short).run_until(4 * SECOND)
    spans = intervals(short)
    assert spans[0][0] >= SECOND + 7
    assert spans[-1][1] <= 2 * SECOND + 11


def test_kernels_run_only_in_the_visits_of_their_process() -> None:
    visits = [(n * SECOND, n * SECOND + 100 * MS + n) for n in range(1, 40)]
    at_once, in_steps = (
        [
            Stream(visits=visits, kernel_ns=kernel_ms * MS, busy_ratio=busy_ratio, seed="a")
            for kernel_ms, busy_ratio in ((30, 0.9), (5, 0.5), (400, 0.1))
        ]
        for _ in range(2)
    )
    device(*at_once).run_until(60 * SECOND)
    stepped = device(*in_steps)
    for step in range(1, 601):
        stepped.run_until(step * 100 * MS)
    assert intervals(*at_once) == intervals(*in_steps)
    for one in at_once:
        found = [
            [span for span in one.busy.intervals() if start <= span[0] and span[1] <= end]
            for start, end in visits
        ]
        assert all(found)
        assert sum(map(len, found)) == len(list(one.busy.intervals()))
        # A kernel waits for its turn at most as long as its process is on the GPU.
        there_ns = sum(end - start for start, end in visits)
        assert one.busy.until(60 * SECOND) <= one.pending_until(60 * SECOND) <= there_ns
