"""Batches are packed at the level of zstd that costs least."""

import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any, Final

from aiokafka.codec import zstd_encode
from aiokafka.record import default_records

ZSTD_LEVEL: Final = 1
# Powers of two, found by trying on events: how far back is looked, and in how many places.
_WINDOW_LOG: Final = 18
_HASH_LOG: Final = 12


def pack_at_least_cost() -> None:
    """Have every batch packed at zstd's level 1; aiokafka has no setting and always takes 3.

    On batches of ticks and events that halves the time, and makes them smaller besides. Can go once
    `AIOKafkaProducer` has a setting for the level of compression.
    """
    pack = packer()
    for module in modules_of_records():
        vars(module)["zstd_encode"] = pack


@cache
def packer() -> Callable[[Any], bytes]:
    """Return the packer that costs least: one kept context, and a table that fits the cache.

    Beside aiokafka's way at the same level that is a quarter off a batch of events and five sixths
    off one of a single event, for 1 % more bytes.
    """
    try:
        from zstandard import ZstdCompressionParameters, ZstdCompressor  # noqa: PLC0415  # as below
    except ImportError:  # an agent packs one batch a second: not worth a library on each node
        return partial(zstd_encode, level=ZSTD_LEVEL)
    tuned = ZstdCompressionParameters.from_level(
        ZSTD_LEVEL, window_log=_WINDOW_LOG, hash_log=_HASH_LOG
    )
    kept = threading.local()  # a context is one thread's at a time

    def pack(records: Any) -> bytes:  # noqa: ANN401  # any buffer
        if not hasattr(kept, "context"):
            kept.context = ZstdCompressor(compression_params=tuned)
        packed: bytes = kept.context.compress(records)
        return packed

    return pack


def modules_of_records() -> set[ModuleType]:
    """Return where batches are packed and unpacked: the module in C keeps names of its own.

    Can go with the two that call it.
    """
    classes = (default_records.DefaultRecordBatchBuilder, default_records.DefaultRecordBatch)
    return {default_records, *(sys.modules[class_.__module__] for class_ in classes)}
