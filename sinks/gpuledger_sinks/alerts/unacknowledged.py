"""When what was polled is acknowledged: once an Alertmanager has answered all that it brought.

And once the conditions that it has changed are written. Of each partition what came first is
acknowledged first. Pure.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpuledger.bus.protocol import TopicPartition
from gpuledger.records import NodeConditions
from gpuledger_sinks.alerts.active_alerts import ActiveAlert
from gpuledger_sinks.alerts.condition_state import NodeStates
from gpuledger_sinks.protocol import Partitions, SinkContext


@dataclass(kw_only=True, slots=True)
class _Polled:
    """What one or more polls brought of a partition."""

    context: SinkContext
    next_offset: int
    time_ns: int | None
    alerts: list[ActiveAlert]
    """What has to be answered first."""
    states: dict[str, NodeConditions | None]
    """The conditions that it has changed, which are written then."""


class Unacknowledged:
    """For each partition what waits for an answer, in the order of its offsets."""

    def __init__(self) -> None:
        self._polled: dict[TopicPartition, deque[_Polled]] = {}
        self.to_write: dict[TopicPartition, _Polled] = {}
        """What is acknowledged once its conditions are written, of each partition as one."""

    def add(
        self,
        partition: TopicPartition,
        *,
        context: SinkContext,
        next_offset: int,
        time_ns: int | None,
        alerts: Sequence[ActiveAlert],
        states: NodeStates,
    ) -> None:
        """Have all before `next_offset` acknowledged once these alerts are answered.

        `states` are the conditions that were changed by it.
        """
        for alert in alerts:
            alert.changes.awaited = alert.change
        waiting = self._polled.setdefault(partition, deque())
        if waiting and not alerts:  # it waits for the same as what is before it
            last = waiting[-1]
            last.context, last.next_offset = context, next_offset
            last.time_ns = last.time_ns if time_ns is None else time_ns
            last.states |= states
            return
        waiting.append(
            _Polled(
                context=context,
                next_offset=next_offset,
                time_ns=time_ns,
                alerts=list(alerts),
                states=dict(states),
            )
        )

    def acknowledge_answered(self) -> None:
        """Acknowledge what need not wait any more; `to_write` has what has conditions to write."""
        for partition, waiting in self._polled.items():
            for polled in waiting:
                polled.alerts = [alert for alert in polled.alerts if not alert.is_answered]
            while waiting and not waiting[0].alerts:
                done = waiting.popleft()
                # What is not written yet is of ticks before these: the later says what counts.
                if (before := self.to_write.get(partition)) is not None:
                    done.states = before.states | done.states
                if done.states:
                    self.to_write[partition] = done
                else:
                    done.context.acknowledge(partition, done.next_offset, time_ns=done.time_ns)

    def acknowledge_written(self, partition: TopicPartition, written: _Polled) -> None:
        """Acknowledge what was in `to_write`, now that its conditions are written.

        Nothing where the partition was given up meanwhile; what was answered meanwhile waits on.
        """
        waiting = self.to_write.get(partition)
        if waiting is None:
            return
        if waiting is written:
            del self.to_write[partition]
        written.context.acknowledge(partition, written.next_offset, time_ns=written.time_ns)

    def count(self) -> int:
        """Return how many alerts are waited for."""
        return sum(len(polled.alerts) for waiting in self._polled.values() for polled in waiting)

    def drop(self, partitions: Partitions) -> None:
        """Forget partitions: what was not answered of them is their next owner's to send."""
        for partition in partitions:
            self._polled.pop(partition, None)
            self.to_write.pop(partition, None)
