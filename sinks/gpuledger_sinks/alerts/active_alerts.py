"""The active alerts: when each began and ends, and which Alertmanagers accepted or rejected it.

The alerts follow Alertmanager's rules for clients: a firing alert is sent repeatedly, each time
with an end in the near future, and a resolved alert is sent for five more minutes. Times sent to
Alertmanager are wall-clock times; durations are measured by the monotonic clock. Pure; times are
passed in.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from gpuledger.clock import NS_PER_HOUR, NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.keys import key_in
from gpuledger_sinks.alerts.slots import AlertSlots, Labels

_ENDS_AFTER_RESENDS: Final = 4
"""Number of resend intervals after which a firing alert ends. As in Prometheus, two sends may be
lost before Alertmanager ends the alert."""
_SEND_END_NS: Final = 300 * NS_PER_SECOND
"""How long an alert is still sent after it has ended."""
_REJECTED_NS: Final = NS_PER_HOUR
"""How long the end of an alert may be postponed if Alertmanagers rejected the alert and none
accepted it."""

MAX_CHARACTERS: Final = 2_000
"""Maximum length of each label and annotation; a record may have a million characters."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Now(NamedTuple):
    """This machine's clocks at one instant."""

    time_ns: int
    """Wall-clock time, in nanoseconds since the epoch."""
    monotonic_ns: int
    """Time of the monotonic clock, in nanoseconds."""

    @classmethod
    def of(cls, clock: Clock) -> "Now":
        """Return the current times."""
        return cls(clock.time_ns(), clock.monotonic_ns())


@dataclass(slots=True)
class Changes:
    """Which changes of an alert were answered by Alertmanagers, and which answers records wait for.

    An alert changes when it begins, continues or ends. Its changes are numbered from 1, and each
    must be sent. An Alertmanager answers a change by accepting or rejecting the alert.
    """

    answered: int = 0
    """Number of the last change that an Alertmanager answered, or that is never sent."""
    awaited: int = 0
    """Number of the last change that must be answered before polled records are acknowledged."""
    max_together: dict[str, int] = field(default_factory=dict)
    """The maximum number of alerts in a batch with this alert, for each Alertmanager that rejected
    the alert."""

    def record_answer(self, change: int) -> None:
        """Record that a change was answered; a later change may have been answered before."""
        self.answered = max(self.answered, change)


@dataclass(kw_only=True)
class ActiveAlert:
    """One alert, firing or ended recently; each of its changes (`Changes`) makes a new object."""

    labels: Labels
    """The sorted labels with which the alert began; they identify it."""
    annotations: Mapping[str, str]
    """Texts for people."""
    starts_ns: int
    """When it began, in nanoseconds since the epoch."""
    ends_ns: int | None = None
    """When it ends, in nanoseconds since the epoch; `None` while it fires."""
    changed_ns: int
    """When it changed last, by the monotonic clock."""
    seen_ns: int
    """When a tick last showed that its state continues, by the monotonic clock."""
    over_ns: int = 0
    """When it ends, by the monotonic clock; unused while `ends_ns` is `None`."""
    hold_ns: int = 0
    """Minimum time for which it stays active after an Alertmanager accepts it."""
    begun_ns: int = 0
    """When this sink activated it, by the monotonic clock."""
    unresponsive_ns: int = 0
    """Time without a tick after which a firing alert is dropped."""
    taken_ns: dict[str, int] = field(default_factory=dict)
    """When each Alertmanager last accepted the alert since this change, by the monotonic clock."""
    rejected_ns: dict[str, int] = field(default_factory=dict)
    """When each Alertmanager last rejected the alert since this change, by the monotonic clock."""
    change: int = 1
    """The number of this change."""
    changes: Changes = field(default_factory=Changes)
    """The alert's changes; later objects for the same alert have the same `changes`."""

    @property
    def is_answered(self) -> bool:
        """Whether an Alertmanager has answered this change or a later one."""
        return self.changes.answered >= self.change

    def hold_until_taken(self, now: Now) -> None:
        """Postpone the end of an alert to `hold_ns` from now if no Alertmanager has accepted it.

        Otherwise the end could pass before an Alertmanager accepts the alert. An alert without an
        end is not changed. If Alertmanagers only rejected the alert, its end is no longer postponed
        after `_REJECTED_NS`.
        """
        # Alertmanager accepts an alert whose first post is past its end, but does not notify.
        is_given_up = self.rejected_ns and now.monotonic_ns - self.seen_ns >= _REJECTED_NS
        if self.hold_ns and self.ends_ns is not None and not self.taken_ns and not is_given_up:
            self.ends_ns = now.time_ns + self.hold_ns
            self.over_ns = now.monotonic_ns + self.hold_ns

    def answered_ns(self, receiver: str) -> int | None:
        """Return when an Alertmanager last accepted or rejected the alert since this change.

        The time is by the monotonic clock. Returns `None` if the Alertmanager has done neither.
        """
        taken_ns, rejected_ns = self.taken_ns.get(receiver), self.rejected_ns.get(receiver)
        if taken_ns is None or rejected_ns is None:
            return rejected_ns if taken_ns is None else taken_ns
        return max(taken_ns, rejected_ns)

    def is_over(self, *, now: Now) -> bool:
        """Return whether the alert can be dropped.

        An alert is never dropped while polled records wait for its answer. Otherwise it can be
        dropped five minutes after its end. If it still fires, it can be dropped once no tick has
        confirmed its state for `unresponsive_ns`.
        """
        # Polled records are acknowledged only after the answer.
        if self.changes.awaited > self.changes.answered:
            return False
        if self.ends_ns is None:
            return now.monotonic_ns - self.seen_ns >= self.unresponsive_ns
        return now.monotonic_ns - self.over_ns >= _SEND_END_NS

    def as_json(self, *, now: Now, resend_ns: int) -> dict[str, Any]:
        """Return the alert in the format of `/api/v2/alerts`."""
        ends_ns = self.ends_ns
        if ends_ns is None:
            # Alertmanager ends an alert that is not sent again. Without `endsAt`, its own setting
            # decides when. The end is set here, so that all Alertmanagers of a cluster agree, and
            # so that a restart of the sink does not end the alert early.
            ends_ns = now.time_ns + _ENDS_AFTER_RESENDS * resend_ns
        return {
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "startsAt": rfc3339(self.starts_ns),
            # An end before the start is rejected with 400.
            "endsAt": rfc3339(max(ends_ns, self.starts_ns)),
        }


def rfc3339(time_ns: int) -> str:
    """Return a time as RFC 3339 in UTC, with microseconds."""
    return (_EPOCH + timedelta(microseconds=time_ns // NS_PER_US)).isoformat()


class ActiveAlerts:
    """All alerts of one partition, by their labels."""

    def __init__(self, *, slots: AlertSlots | None = None) -> None:
        """Use slots that are shared with other partitions; by default, use separate ones."""
        self._active: dict[Labels, ActiveAlert] = {}
        self._slots = slots or AlertSlots()

    def __iter__(self) -> Iterator[ActiveAlert]:
        """Yield all alerts."""
        return iter(self._active.values())

    def confirm(self, key: Labels, *, now: Now) -> None:
        """Record that the alert's state continues, if the alert is active."""
        if key in self._active:
            self._active[key].seen_ns = now.monotonic_ns

    def end(self, key: Labels, *, at_ns: int, now: Now) -> None:
        """End an active alert at `at_ns`, or now if `at_ns` is in the future."""
        if key in self._active:
            alert = self._active[key]
            # A new object without answers: the answer to a request in flight with the firing alert
            # must not count as the answer to its end.
            self._active[key] = replace(
                alert,
                ends_ns=max(alert.starts_ns, min(at_ns, now.time_ns)),
                # The alert is sent for some minutes from now, however long ago it ended by the
                # node's clock.
                over_ns=now.monotonic_ns,
                hold_ns=0,
                changed_ns=now.monotonic_ns,
                change=alert.change + 1,
                taken_ns={},
                rejected_ns={},
            )

    def hold(
        self,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        at_ns: int,
        hold_ns: int,
        now: Now,
    ) -> bool:
        """Activate an alert that began at `at_ns`, and end it `hold_ns` from now.

        If the alert is already active, it continues. If too many alerts are active, an older one is
        dropped: one of the same node if this node has too many, otherwise one of the node with the
        most alerts. Returns whether an alert was dropped. A dropped alert that no Alertmanager had
        accepted yet is never reported.
        """
        alert, known, is_full = self._begin(labels, annotations, at_ns=at_ns, now=now)
        alert.hold_ns = hold_ns
        alert.ends_ns = now.time_ns
        alert.hold_until_taken(now)
        if known is not None and known.ends_ns is not None and known.over_ns > now.monotonic_ns:
            alert.starts_ns = min(alert.starts_ns, known.starts_ns)
        return is_full

    def stand(
        self,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        at_ns: int,
        hold_ns: int,
        unresponsive_ns: int,
        now: Now,
    ) -> None:
        """Activate an alert that began at `at_ns` and has no end yet.

        It fires until `end_state` is called, or until no tick has confirmed it for
        `unresponsive_ns`. If too many alerts are active, an older one is dropped as in `hold`.
        """
        alert, known, _ = self._begin(labels, annotations, at_ns=at_ns, now=now)
        alert.hold_ns, alert.unresponsive_ns = hold_ns, unresponsive_ns
        if known is not None and known.ends_ns is None:
            alert.starts_ns = min(alert.starts_ns, known.starts_ns)
            alert.begun_ns = known.begun_ns

    def _begin(
        self, labels: Mapping[str, str], annotations: Mapping[str, str], *, at_ns: int, now: Now
    ) -> tuple[ActiveAlert, ActiveAlert | None, bool]:
        """Return the new alert, its previous object or `None`, and whether another was dropped.

        If too many alerts are active, an older one is dropped as in `hold`.
        """
        key = _identity(labels)
        node, known = _node_of(key), self._active.get(key)
        going = None if known else self._slots.oldest_to_go(node)
        if going:
            going.owner.drop(going.key)
            self._slots.leave_out(_node_of(going.key))
        self._slots.take(key, node, self)
        # A new object even if the alert is active: an answer to a request in flight must count for
        # the previous form only.
        alert = self._active[key] = ActiveAlert(
            labels=key,
            annotations=_cut(annotations),
            # An end is at most the current time, so a later start could not be ended.
            starts_ns=min(at_ns, now.time_ns),
            changed_ns=now.monotonic_ns,
            seen_ns=now.monotonic_ns,
            begun_ns=now.monotonic_ns,
            change=known.change + 1 if known else 1,
            changes=known.changes if known else Changes(),
        )
        return alert, known, going is not None

    def end_state(self, key: Labels, *, at_ns: int, now: Now) -> None:
        """End the alert of a state now, or as soon as it has been active for its minimum time.

        The minimum time is needed because Alertmanager sends no notification of an alert that ends
        before Alertmanager has evaluated it.
        """
        alert = self._active.get(key)
        if alert is None or alert.ends_ns is not None:
            return
        stood_ns = now.monotonic_ns - alert.begun_ns if alert.taken_ns else 0
        if stood_ns >= alert.hold_ns:
            self.end(key, at_ns=at_ns, now=now)
            return
        held = self._active[key] = replace(
            alert,
            ends_ns=now.time_ns,
            hold_ns=alert.hold_ns - stood_ns,
            changed_ns=now.monotonic_ns,
            seen_ns=now.monotonic_ns,
            change=alert.change + 1,
            taken_ns={},
            rejected_ns={},
        )
        held.hold_until_taken(now)

    def reword(self, key: Labels, annotations: Mapping[str, str]) -> None:
        """Replace the annotations of an active alert; they are sent with its next request."""
        if key in self._active:
            self._active[key].annotations = _cut(annotations)

    def stands(self, key: Labels) -> bool:
        """Return whether an alert is still kept: it fires, or has ended recently."""
        return key in self._active

    def fires(self, key: Labels, *, now: Now) -> bool:
        """Return whether an alert is kept and its end has not passed."""
        alert = self._active.get(key)
        return alert is not None and (alert.ends_ns is None or alert.over_ns > now.monotonic_ns)

    @staticmethod
    def identity_of(labels: Mapping[str, str]) -> Labels:
        """Return the identity of an alert with these labels."""
        return _identity(labels)

    def drop(self, key: Labels) -> ActiveAlert:
        """Forget and return an active alert; polled records no longer wait for an answer to it."""
        alert = self._active.pop(key)
        alert.changes.answered = alert.change  # not sent again, so no record waits for it
        self._slots.free(key, _node_of(key))
        return alert

    def leave_out(self, node: str) -> None:
        """Count an alert of this node that was not activated because too many are active."""
        self._slots.leave_out(node)

    def drop_all(self) -> None:
        """Forget all alerts, for a revoked partition."""
        for key in list(self._active):
            self.drop(key)

    def not_awaited(self) -> list[ActiveAlert]:
        """Return the alerts whose newest change has no answer yet.

        Alerts are left out if polled records already wait for that answer.
        """
        return [
            alert
            for alert in self
            if alert.change > max(alert.changes.answered, alert.changes.awaited)
        ]

    def forget(self, *, now: Now) -> list[ActiveAlert]:
        """Drop the alerts for which `is_over` returns true, and return them."""
        over = [alert for alert in self if alert.is_over(now=now)]
        for alert in over:
            self.drop(alert.labels)
        return over


def _cut(annotations: Mapping[str, str]) -> dict[str, str]:
    return {name: text[:MAX_CHARACTERS] for name, text in annotations.items()}


def _node_of(key: Labels) -> str:
    labels = dict(key)
    return key_in(labels.get("cluster", ""), labels.get("node", ""))


# Alertmanager removes empty labels and identifies an alert by the rest, in any order.
def _identity(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value[:MAX_CHARACTERS]) for name, value in labels.items() if value))


def record_taken(alerts: Iterable[ActiveAlert], receiver: str, *, now: Now) -> None:
    """Record that the Alertmanager has accepted these alerts."""
    for alert in alerts:
        alert.taken_ns[receiver] = now.monotonic_ns
        alert.changes.max_together.pop(receiver, None)
        alert.changes.record_answer(alert.change)


def record_rejected(alert: ActiveAlert, receiver: str, *, now: Now) -> bool:
    """Record that the Alertmanager rejects this alert.

    Returns whether this is its first rejection since the alert's last change.
    """
    is_news = receiver not in alert.rejected_ns
    alert.rejected_ns[receiver] = now.monotonic_ns
    alert.changes.max_together[receiver] = 1
    alert.changes.record_answer(alert.change)
    return is_news


def record_partly_rejected(alerts: Sequence[ActiveAlert], receiver: str) -> None:
    """Record that the Alertmanager rejects a batch: halve the next batches with these alerts."""
    for alert in alerts:
        alert.changes.max_together[receiver] = (len(alerts) + 1) // 2
