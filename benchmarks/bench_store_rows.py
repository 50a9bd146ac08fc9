"""Rows of the store in CPU seconds per event, against decoding that event in the same run."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from benchmarks.events import booked
from benchmarks.figure import Figure
from gpuledger.codec import Decoder, encode
from gpuledger.ledger.entries import RecordPosition
from gpuledger.records import GpuEvent
from gpuledger_sinks.store.buffer import rows_of
from tests.default_topics import EVENTS

NAME = "store_rows"
_ROUNDS: Final = 15
_REPEATS: Final = 300


class _Place(NamedTuple):
    """The position at which an event was read."""

    partition: int
    offset: int


def run() -> Iterator[Figure]:
    """Yield the cost of an event's rows: the best of several rounds, because load only adds."""
    event = booked(1)
    encoded = encode(event)
    decode = Decoder(topic=EVENTS.name, record=GpuEvent).decode
    yield Figure(
        name=f"{NAME}.make",
        value=_cpu_seconds(partial(_make_rows, event, _Place(3, 77))),
        unit="seconds/event",
        reference=_cpu_seconds(partial(decode, encoded)),
    )


def _make_rows(event: GpuEvent, place: RecordPosition) -> int:
    return len(list(rows_of(event, place, ingested_time_ns=event.time_ns)))


def _cpu_seconds(step: Callable[[], object]) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(_REPEATS):
            step()
        rounds.append((time.process_time() - began) / _REPEATS)
    return min(rounds)
