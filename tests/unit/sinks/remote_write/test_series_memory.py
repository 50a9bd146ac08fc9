"""The memory of the series of nodes, measured, compared with the counted memory."""

import gc
import tracemalloc
from typing import Final, NamedTuple

import pytest

from benchmarks.events import booked
from benchmarks.remote_write_memory import own_names
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import decoder_of, encode
from gpuledger.keys import key_in
from gpuledger.ledger.series import EventSeries
from gpuledger.records import GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries, series_budget
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals
from gpuledger_sinks.remote_write.wire import Version, encode_request
from tests.unit.sinks.remote_write.interval_samples import RECORD

_NODES: Final = 12
_TICKS: Final = 6
_INTERVAL_NS: Final = 3 * NS_PER_SECOND


class _Memory(NamedTuple):
    series: int
    counted_bytes: int
    taken_bytes: int


def _tick(node: int, tick: int) -> GpuEvent:
    """Return a tick as decoded from Kafka: it shares no text object with another tick."""
    name = f"gpu-node-{node:04d}.cluster.example"
    event = own_names(encode(booked(tick, node=name)), node)
    found: GpuEvent = decoder_of("events", GpuEvent).decode(event)
    return found


def _keep(nodes: range, version: Version) -> tuple[ActiveSeries, list[NodeIntervals], int]:
    """Return the state of nodes whose last interval is open, and its counted memory."""
    budget, values = series_budget(2**40), EventSeries()
    series, kept = ActiveSeries(budget=budget), list[NodeIntervals]()
    for node in nodes:
        key = key_in("default", f"gpu-node-{node:04d}.cluster.example")
        kept.append(NodeIntervals(key, values=values, interval_ns=_INTERVAL_NS))
        for tick in range(_TICKS):
            for samples in kept[-1].add(_tick(node, tick), RECORD, is_past=False):
                if not samples.is_of_incidents:
                    encode_request(version, series.encode(samples).timed)
    return series, kept, budget.held_bytes


def _measure(version: Version) -> _Memory:
    # The first one creates what all nodes share.
    _keep(range(1), version)
    gc.collect()
    tracemalloc.start()
    try:
        series, kept, counted_bytes = _keep(range(1, 1 + _NODES), version)
        gc.collect()
        taken_bytes, _ = tracemalloc.get_traced_memory()
        assert len(kept) == _NODES
        return _Memory(len(series), counted_bytes, taken_bytes)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", Version)
def test_the_counted_memory_of_series_is_the_memory_that_they_take(version: Version) -> None:
    measured = _measure(version)

    assert measured.counted_bytes == pytest.approx(measured.taken_bytes, rel=0.2)


@pytest.mark.parametrize(("version", "max_bytes"), [(Version.V1, 300), (Version.V2, 260)])
def test_a_series_takes_a_known_number_of_bytes_with_all_state_of_its_node(
    version: Version, max_bytes: int
) -> None:
    measured = _measure(version)

    assert measured.taken_bytes < max_bytes * measured.series
