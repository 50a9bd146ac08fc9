"""Encodes records as messages, and queues them in memory.

Each tick, incident and inventory is one bundle of messages. A message's key is the node, and its
time stamp is the record's own time. The queue separates sampling, which must not wait, from
publishing, which may. The queue is bounded: if it is full, the oldest bundle is dropped and
counted. This module uses neither the broker nor the disk.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import encode, validate
from gpuledger.keys import OfNode, node_key
from gpuledger.records import Incident, Inventory
from gpuledger.records.fitting import Cut, fit, fit_bytes
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats
from gpuledger.topics import Topics
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.metrics import QUEUE_TICKS, TICKS_DROPPED, VALUES_CUT

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class BundledMessage(NamedTuple):
    """A message of a bundle."""

    topic: str
    message: Message
    boot_time_ns: int | None = None
    """The time of the node's boot by the clock that gave the message its times, in nanoseconds
    since the epoch; `None` if it is unknown (`gpuledger_agent.publish.clock_steps`)."""


MessageBundle = tuple[BundledMessage, ...]
"""Messages that are sent together. Encoded messages take a fraction of the memory that their
records take."""


class _NodeRecord(OfNode, Protocol):
    @property
    def time_ns(self) -> int: ...


def bundle_tick(tick: NodeTick, topics: Topics, *, check: Check | None = None) -> MessageBundle:
    """Return a tick's bundle: the sample, then the other readings (if any) and process records.

    The sample comes first, because usage is computed from the sample. `check` fails if rows of the
    sample or the readings were left out.
    """
    cut: Cut = Counter()
    sample = (topics.samples.name, _message(tick.sample, cut))
    readings = ((topics.readings.name, _message(tick.readings, cut)),) if tick.readings.gpus else ()
    processes = ((topics.processes.name, _message(record)) for record in tick.processes)
    if check:
        # Cuts with other names shorten single values, such as the name of a GPU's model.
        lists = ("NodeSample.", "NodeReadings.")
        rows = {name: count for name, count in cut.items() if name.startswith(lists)}
        if rows:
            counts = ", ".join(f"{count} of {name}" for name, count in sorted(rows.items()))
            check.failed(f"the last sample exceeds a record's limits; rows left out: {counts}")
        else:
            check.ok("the last sample is complete")
    return tuple(
        BundledMessage(topic, message, tick.boot_time_ns)
        for topic, message in (sample, *readings, *processes)
    )


def bundle_incident(
    incident: Incident, topics: Topics, *, boot_time_ns: int | None = None
) -> MessageBundle:
    """Return a bundle with one message: the incident."""
    return (BundledMessage(topics.incidents.name, _message(incident), boot_time_ns),)


def bundle_inventory(
    inventory: Inventory, topics: Topics, *, boot_time_ns: int | None = None
) -> MessageBundle:
    """Return a bundle with one message: the inventory."""
    return (BundledMessage(topics.inventory.name, _message(inventory), boot_time_ns),)


def time_ms(bundle: MessageBundle) -> int:
    """Return the event time of a bundle's first message, in milliseconds since the epoch."""
    return bundle[0].message.timestamp_ms


def bundle_size_bytes(bundle: MessageBundle) -> int:
    """Return the total size of the values of a bundle's messages, in bytes."""
    return sum(len(bundled.message.value or b"") for bundled in bundle)


def _message(record: _NodeRecord, total: Cut | None = None) -> Message:
    """Encode a record as a message; shorten texts and lists that exceed its limits or a message's.

    Add the cuts to `total`. Raise `msgspec.ValidationError` if a number is outside the limits of
    its field.
    """
    key = node_key(record).encode()
    try:
        validate(record)
    except msgspec.ValidationError:
        # Names come from the driver, the kernel and the kubelet, and may exceed our limits.
        record, cut = fit(record)
        _count_cut(cut, total)
        validate(record)
    value = encode(record)
    if size_bytes(key, value) > MAX_MESSAGE_BYTES:
        record, cut = fit_bytes(record, max_bytes=MAX_MESSAGE_BYTES - len(key))
        _count_cut(cut, total)
        value = encode(record)
    return Message(key=key, value=value, timestamp_ms=record.time_ns // NS_PER_MS)


def _count_cut(cut: Cut, total: Cut | None) -> None:
    for name, count in cut.items():
        VALUES_CUT.labels(field=name).inc(count)
        if logged := _repeats.count(name, more=count):
            _log.warning("values_shortened", field=name, count=logged)
    if total is not None:
        total.update(cut)


class QueuedBundle(NamedTuple):
    """A bundle, and the time at which it began to wait."""

    since_seconds: float
    """Start of the wait, on the caller's clock."""
    bundle: MessageBundle


class BundleQueue:
    """A queue in memory of at most `max_bundles` bundles, oldest first."""

    def __init__(self, *, max_bundles: int) -> None:
        self._max_bundles = max_bundles
        self._waiting: deque[QueuedBundle] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, bundle: object) -> bool:
        return any(waiting.bundle is bundle for waiting in self._waiting)

    @property
    def is_half_full(self) -> bool:
        """Whether the queue is more than half full.

        Bundles should then be moved to the on-disk spool, before some have to be dropped.
        """
        return len(self._waiting) > self._max_bundles // 2

    @property
    def oldest_since_seconds(self) -> float | None:
        """The time at which the oldest bundle began to wait; `None` if the queue is empty."""
        return self._waiting[0].since_seconds if self._waiting else None

    def put(self, waiting: QueuedBundle) -> None:
        """Add the newest bundle; if the queue is full, drop and count the oldest."""
        self._waiting.append(waiting)
        # Increment rather than set, because several nodes may run in one process.
        QUEUE_TICKS.inc()
        self._keep_within_bounds()

    def take(self, *, max_bundles: int) -> list[QueuedBundle]:
        """Remove and return at most `max_bundles` of the oldest bundles, oldest first."""
        count = min(max_bundles, len(self._waiting))
        taken = [self._waiting.popleft() for _ in range(count)]
        QUEUE_TICKS.dec(count)
        return taken

    def put_back(self, taken: Iterable[QueuedBundle]) -> None:
        """Put bundles from `take` back in front of all others; if there are too many, drop some.

        The oldest bundles are dropped and counted.
        """
        before = len(self._waiting)
        # `extendleft` reverses the order.
        self._waiting.extendleft(reversed(list(taken)))
        QUEUE_TICKS.inc(len(self._waiting) - before)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        dropped = max(0, len(self._waiting) - self._max_bundles)
        for _ in range(dropped):
            self._waiting.popleft()
        TICKS_DROPPED.inc(dropped)
        QUEUE_TICKS.dec(dropped)
