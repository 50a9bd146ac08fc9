"""For how long a consumer has been kept from records that are there: behind an open transaction.

A transaction that nobody ends withholds all that is written to its partition after it, until the
brokers abort it (`transaction.max.timeout.ms`, 15 minutes). Its consumer sees nothing of that: its
poll finds no record, as on a partition without any. Brokers tell it beside each answer all the
same, by two offsets. Pure but for the clock, and one gauge.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from gpuledger.bus import metrics
from gpuledger.bus.protocol import Subscription, TopicPartition


class Withheld:
    """Since when each partition has stood before an open transaction."""

    def __init__(
        self, *, subscription: Subscription, clock_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock_seconds = clock_seconds
        self._since: dict[TopicPartition, tuple[int, float]] = {}
        """The offset before which it stands, and when that was seen first."""
        for topic in subscription.topics:
            gauge = metrics.RECORDS_WITHHELD_SECONDS.labels(
                topic=topic, consumer=subscription.group
            )
            gauge.set_function(partial(self._seconds_of, topic))

    def observe(self, offsets: Mapping[TopicPartition, tuple[int, int, int]]) -> None:
        """Record how partitions stand: the position, the last stable and the end offset of each.

        Those that are not named are not read any more.
        """
        now = self._clock_seconds()
        since: dict[TopicPartition, tuple[int, float]] = {}
        for partition, (position, stable, end) in offsets.items():
            if position >= stable and stable < end:
                known = self._since.get(partition)
                # Each transaction withholds what is behind it for a moment: another offset, another
                # transaction.
                since[partition] = known if known and known[0] == stable else (stable, now)
        self._since = since

    def seconds(self) -> float:
        """Return the longest time of all partitions; 0 where nothing is withheld."""
        return self._longest(at for _, at in list(self._since.values()))

    def _seconds_of(self, topic: str) -> float:
        return self._longest(
            at for partition, (_, at) in list(self._since.items()) if partition[0] == topic
        )

    def _longest(self, since: Iterable[float]) -> float:
        begun_at = min(since, default=None)
        return 0.0 if begun_at is None else self._clock_seconds() - begun_at
