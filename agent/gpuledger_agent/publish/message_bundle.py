"""What leaves the node, as bytes, and the queue in memory of what waits.

Each tick, incident and inventory is one bundle of messages, keyed by node and stamped with the
record's own time. The queue stands between sampling, which does not wait, and what may; it is
bounded: when it is full the oldest bundle is dropped, counted. No broker and no disk here.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

import msgspec
import structlog

from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import encode, validate
from gpuledger.keys import OfNode, node_key
from gpuledger.records import Incident, Inventory
from gpuledger.records.fitting import fit
from gpuledger.runtime.logs import Repeats
from gpuledger.topics import Topics
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.metrics import QUEUE_TICKS, TICKS_DROPPED, VALUES_CUT

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()

MessageBundle = tuple[tuple[str, Message], ...]
"""Messages that belong together, each with its topic; as bytes they take a fraction of the memory
that their records do."""


class _NodeRecord(OfNode, Protocol):
    @property
    def time_ns(self) -> int: ...


def bundle_tick(tick: NodeTick, topics: Topics) -> MessageBundle:
    """Return a tick's bundle: the sample, its other readings, then what happened to processes.

    The sample is the first to be sent: it is what is booked.
    """
    readings = ((topics.readings.name, _message(tick.readings)),) if tick.readings.gpus else ()
    processes = ((topics.processes.name, _message(record)) for record in tick.processes)
    return ((topics.samples.name, _message(tick.sample)), *readings, *processes)


def bundle_incident(incident: Incident, topics: Topics) -> MessageBundle:
    """Return an incident's bundle."""
    return ((topics.incidents.name, _message(incident)),)


def bundle_inventory(inventory: Inventory, topics: Topics) -> MessageBundle:
    """Return an inventory's bundle."""
    return ((topics.inventory.name, _message(inventory)),)


def time_ms(bundle: MessageBundle) -> int:
    """Return the event time of a bundle's first message, milliseconds since the epoch."""
    return bundle[0][1].timestamp_ms


def bundle_size_bytes(bundle: MessageBundle) -> int:
    """Return the size of a bundle's values."""
    return sum(len(message.value or b"") for _, message in bundle)


def _message(record: _NodeRecord) -> Message:
    """Encode a record; what is longer than it may be, by whatever the node was told, is cut.

    Raises `msgspec.ValidationError` where a number is none that its field may have.
    """
    try:
        validate(record)
    except msgspec.ValidationError:
        # Names come from the driver, the kernel and the kubelet: none of them knows our bounds.
        record, cut = fit(record)
        for name, count in cut.items():
            VALUES_CUT.labels(field=name).inc(count)
            if logged := _repeats.count(name, more=count):
                _log.warning("values_shortened", field=name, count=logged)
        validate(record)
    return Message(
        key=node_key(record).encode(),
        value=encode(record),
        timestamp_ms=record.time_ns // NS_PER_MS,
    )


class QueuedBundle(NamedTuple):
    """A bundle, and since when it waits."""

    since_seconds: float
    """On the caller's own clock."""
    bundle: MessageBundle


class BundleQueue:
    """Bundles in their order, at most `max_bundles` of them."""

    def __init__(self, *, max_bundles: int) -> None:
        self._max_bundles = max_bundles
        self._waiting: deque[QueuedBundle] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to take bundles elsewhere, before any is dropped."""
        return len(self._waiting) > self._max_bundles // 2

    @property
    def oldest_since_seconds(self) -> float | None:
        """Since when the oldest bundle waits; `None` where none does."""
        return self._waiting[0].since_seconds if self._waiting else None

    def put(self, waiting: QueuedBundle) -> None:
        """Add the newest bundle; where there is no room the oldest one is dropped and counted."""
        self._waiting.append(waiting)
        # Counted up and down rather than set: several nodes may run in one process.
        QUEUE_TICKS.inc()
        self._keep_within_bounds()

    def take(self, *, max_bundles: int) -> list[QueuedBundle]:
        """Take the oldest bundles, in their order."""
        count = min(max_bundles, len(self._waiting))
        taken = [self._waiting.popleft() for _ in range(count)]
        QUEUE_TICKS.dec(count)
        return taken

    def put_back(self, taken: Iterable[QueuedBundle]) -> None:
        """Put what was taken in front of all others again."""
        before = len(self._waiting)
        # In front, as they are the oldest, and in their own order: a deque extends leftwards.
        self._waiting.extendleft(reversed(list(taken)))
        QUEUE_TICKS.inc(len(self._waiting) - before)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        dropped = max(0, len(self._waiting) - self._max_bundles)
        for _ in range(dropped):
            self._waiting.popleft()
        TICKS_DROPPED.inc(dropped)
        QUEUE_TICKS.dec(dropped)
