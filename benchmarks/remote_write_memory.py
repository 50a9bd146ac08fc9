"""Memory of a million series in the remote-write sink, measured in a separate process.

Series of 2,000 nodes with the default interval, from decoded events as they come from Kafka: names
have realistic lengths, and no two nodes share any.
"""

import gc
import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.events import booked
from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import decoder_of, encode
from gpuledger.keys import key_in
from gpuledger.ledger.series import EventSeries
from gpuledger.records import GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries, series_budget
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals
from gpuledger_sinks.remote_write.wire import Version, encode_request
from gpuledger_sinks.settings import RemoteWriteSettings

_NODES: Final = 2_012
_TICKS: Final = 6
_TICK_SECONDS: Final = 5
_UNBOUNDED: Final = 2**40


class SeriesMemory(NamedTuple):
    """The number of series, and the growth of the process for them."""

    series: int
    grown_bytes: int


def measure_memory(version: Version = Version.V2) -> SeriesMemory:
    """Return the memory of about a million series for a version of remote-write."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, version), daemon=True)
    process.start()
    try:
        return SeriesMemory(*ours.recv())
    finally:
        process.join()


def _measure(connection: Connection, version: Version) -> None:
    decode = decoder_of("events", GpuEvent).decode
    values, series = EventSeries(), ActiveSeries(budget=series_budget(_UNBOUNDED))
    record = Record("events", 0, 0, 0, None, None)
    interval_ns = (
        round(RemoteWriteSettings(url="http://localhost").interval_seconds) * NS_PER_SECOND
    )
    nodes: list[NodeIntervals] = []
    gc.collect()
    before_bytes = _resident_bytes()
    for number in range(_NODES):
        name = f"gpu-node-{number:04d}.cluster.example"
        key = key_in("default", name)
        node = NodeIntervals(key, values=values, interval_ns=interval_ns)
        nodes.append(node)
        # The last ticks are in an open interval.
        for tick in range(_TICKS):
            event = decode(own_names(encode(booked(tick * _TICK_SECONDS, node=name)), number))
            for samples in node.add(event, record, is_past=False):
                encode_request(version, series.encode(samples).timed)
    gc.collect()
    connection.send((len(series), _resident_bytes() - before_bytes))


def own_names(event: bytes, number: int) -> bytes:
    """Return an event with UUIDs, UIDs and names of pods that no other node has."""
    return (
        event.replace(b"GPU-0000", b"GPU-%04d" % number)
        .replace(b'"uid-', b'"%08d-0000-4000-8000-00000000' % number)
        .replace(b'"train-', b'"train-%04d-' % number)
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
