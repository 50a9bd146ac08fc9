"""The same join on Quix Streams, as a separate process: `python -m benchmarks.quix_join`.

Decoding, pods, descriptions, books and encoding are the join's own, so only the transport of
records differs: bytes in and out, zstd like the join, otherwise Quix's defaults. Prints the CPU
seconds from the first tick to the last commit, including those of librdkafka's threads.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from quixstreams import Application

from benchmarks.join_load import cache_places, cache_pods
from benchmarks.ticks import Fleet
from gpuledger.codec import Decoder, encode
from gpuledger.records import NodeSample
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.pods.describe import DescriptionCache
from gpuledger_enricher.join.stage import make_event
from tests.default_topics import EVENTS, SAMPLES

_SILENCE_SECONDS: Final = 30.0
_BYTES: Final[dict[str, Any]] = dict.fromkeys(
    ("key_serializer", "key_deserializer", "value_serializer", "value_deserializer"), "bytes"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Join all ticks of the topic."""
    options = _parser().parse_args(arguments)
    join = make_join(Fleet(nodes=options.nodes))
    gc.freeze()  # as the join's own service does
    print(_cpu_seconds(join, options), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quix_join", description=__doc__)
    parser.add_argument("--servers", required=True, help="address of the broker")
    parser.add_argument("--nodes", required=True, type=int, help="number of nodes with cached pods")
    parser.add_argument(
        "--ticks", required=True, type=int, help="number of ticks after which to end"
    )
    return parser


def make_join(fleet: Fleet) -> Callable[[bytes], bytes]:
    """Return the join of one tick with the pods of these nodes, from bytes to bytes."""
    descriptions = DescriptionCache(cache_pods(fleet), cache_places(fleet))
    decode = Decoder(topic=SAMPLES.name, record=NodeSample).decode

    def join(value: bytes) -> bytes:
        sample = decode(value)
        described = descriptions.describe(sample)
        return encode(make_event(sample, book_tick(sample), described))

    return join


def _cpu_seconds(join: Callable[[bytes], bytes], options: argparse.Namespace) -> float:
    began: list[float] = []

    def first(value: bytes) -> bytes:
        if not began:
            began.append(time.process_time())
        return join(value)

    with tempfile.TemporaryDirectory(prefix="gpuledger-quix-") as folder:
        app = _application(options, folder)
        ticks = app.topic(SAMPLES.name, **_BYTES)
        events = app.topic(EVENTS.name, **_BYTES)
        app.dataframe(ticks).apply(first).to_topic(events)
        app.run(count=options.ticks, timeout=_SILENCE_SECONDS, collect=False)
    return time.process_time() - began[0]


def _application(options: argparse.Namespace, folder: str) -> Application:
    return Application(
        broker_address=options.servers,
        consumer_group="quix",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        producer_extra_config={"compression.type": "zstd"},
        auto_create_topics=False,
        state_dir=folder,
        loglevel="WARNING",
    )


if __name__ == "__main__":
    main()
