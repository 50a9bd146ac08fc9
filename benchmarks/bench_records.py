"""The cost of a tick as a record: constructing, validating, encoding and decoding it."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from benchmarks.figure import Figure
from benchmarks.ticks import Fleet
from gpuledger.codec import Decoder, encode, validate
from gpuledger.records import NodeSample
from tests.default_topics import SAMPLES

NAME = "records"
_ROUNDS: Final = 15
_REPEATS: Final = 1_000
T = TypeVar("T", bound=msgspec.Struct)


def run() -> Iterator[Figure]:
    """Yield the CPU time of each step: the best of several rounds, because other load only adds."""
    tick = Fleet(nodes=1).tick(0, 1)
    encoded = encode(tick)
    decode = Decoder(topic=SAMPLES.name, record=NodeSample).decode
    steps: dict[str, Callable[[], object]] = {
        "construct": _constructing(tick),
        "validate": partial(validate, tick),
        "encode": partial(encode, tick),
        "decode": partial(decode, encoded),
    }
    for name, step in steps.items():
        yield Figure(name=f"{NAME}.{name}", value=_cpu_seconds(step), unit="seconds/tick")


def _constructing(tick: NodeSample) -> Callable[[], NodeSample]:
    """Return a function that constructs the tick and all records in it from their values."""
    given = _present(tick)
    gpus, processes, containers = (
        list(map(_present, part)) for part in (tick.gpus, tick.processes, tick.containers)
    )
    of_gpu, of_process = type(tick.gpus[0]), type(tick.processes[0])
    of_container = type(tick.containers[0])

    def construct() -> NodeSample:
        parts = {
            "gpus": _each(of_gpu, gpus),
            "processes": _each(of_process, processes),
            "containers": _each(of_container, containers),
        }
        return NodeSample(**{**given, **parts})

    return construct


def _each(record: type[T], values: Iterable[dict[str, Any]]) -> list[T]:
    return [record(**given) for given in values]


def _present(record: msgspec.Struct) -> dict[str, Any]:
    named = msgspec.structs.asdict(record)
    return {name: value for name, value in named.items() if value is not None}


def _cpu_seconds(step: Callable[[], object]) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(_REPEATS):
            step()
        rounds.append((time.process_time() - began) / _REPEATS)
    return min(rounds)
