"""Acknowledges polled records once an Alertmanager has answered all alerts made from them.

The records of each partition are acknowledged in order. Pure.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpuledger.bus.protocol import TopicPartition
from gpuledger_sinks.alerts.active_alerts import ActiveAlert
from gpuledger_sinks.protocol import Partitions, SinkContext


@dataclass(kw_only=True, slots=True)
class _Polled:
    """The records of a partition from one or more polls."""

    context: SinkContext
    next_offset: int
    time_ns: int | None
    alerts: list[ActiveAlert]
    """The alerts that must be answered before the records are acknowledged."""


class Unacknowledged:
    """Records of each partition that wait for answers, in the order of their offsets."""

    def __init__(self) -> None:
        self._polled: dict[TopicPartition, deque[_Polled]] = {}

    def add(
        self,
        partition: TopicPartition,
        *,
        context: SinkContext,
        next_offset: int,
        time_ns: int | None,
        alerts: Sequence[ActiveAlert],
    ) -> None:
        """Acknowledge all records before `next_offset` once these alerts are answered."""
        for alert in alerts:
            alert.changes.awaited = alert.change
        waiting = self._polled.setdefault(partition, deque())
        if waiting and not alerts:  # these records wait for the last entry's alerts
            last = waiting[-1]
            last.context, last.next_offset = context, next_offset
            last.time_ns = last.time_ns if time_ns is None else time_ns
            return
        waiting.append(
            _Polled(context=context, next_offset=next_offset, time_ns=time_ns, alerts=list(alerts))
        )

    def acknowledge_answered(self) -> None:
        """Acknowledge records whose alerts are answered."""
        for partition, waiting in self._polled.items():
            for polled in waiting:
                polled.alerts = [alert for alert in polled.alerts if not alert.is_answered]
            while waiting and not waiting[0].alerts:
                done = waiting.popleft()
                done.context.acknowledge(partition, done.next_offset, time_ns=done.time_ns)

    def count(self) -> int:
        """Return the number of alerts whose answers are awaited."""
        return sum(len(polled.alerts) for waiting in self._polled.values() for polled in waiting)

    def drop(self, partitions: Partitions) -> None:
        """Forget partitions; their next owner sends the alerts that were not answered."""
        for partition in partitions:
            self._polled.pop(partition, None)
