"""The alerts that stand: what each Alertmanager has yet to be sent, and until when.

Here lives what Alertmanager expects of its clients: a firing alert is sent again and again, each
time with an end a while ahead, a resolved one for some minutes more. Pure; times are given: what
Alertmanager is told is the wall clock's, how long something has lasted is the monotonic clock's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from gpuledger.clock import NS_PER_HOUR, NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.keys import key_in
from gpuledger_sinks.alerts.slots import AlertSlots, Labels

_ENDS_AFTER_RESENDS: Final = 4
"""As Prometheus does: two sends may be lost before a firing alert ends by itself."""
_SEND_END_NS: Final = 300 * NS_PER_SECOND
"""How long the end of an alert is sent again."""
_REJECTED_NS: Final = NS_PER_HOUR
"""How long an alert that is refused and that nobody took is held anew each time it is offered."""

MAX_CHARACTERS: Final = 2_000
"""Of each label and annotation; a record may bring a million."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Now(NamedTuple):
    """This machine's clocks at one instant."""

    time_ns: int
    """Since the epoch."""
    monotonic_ns: int
    """Of the clock that is never set."""

    @classmethod
    def of(cls, clock: Clock) -> "Now":
        """Return what the clocks show."""
        return cls(clock.time_ns(), clock.monotonic_ns())


@dataclass(slots=True)
class Changes:
    """What has become of the changes of one alert, which are numbered from 1."""

    answered: int = 0
    """The last one that an Alertmanager took or refused, or that nobody will hear of."""
    awaited: int = 0
    """The last one for whose answer somebody waits."""
    max_together: dict[str, int] = field(default_factory=dict)
    """For each Alertmanager that refused it: with how many it may be posted at most."""

    def record_answer(self, change: int) -> None:
        """Record that this change is answered; a later one may have been before."""
        self.answered = max(self.answered, change)


@dataclass(kw_only=True)
class ActiveAlert:
    """One alert, firing or ended a short while ago."""

    labels: Labels
    """Its identity, sorted, as it was when the alert began."""
    annotations: Mapping[str, str]
    """Words for people."""
    starts_ns: int
    """Since when, nanoseconds since the epoch."""
    ends_ns: int | None = None
    """Until when, nanoseconds since the epoch; `None` while it fires."""
    changed_ns: int
    """Since when it is as it is now, by the monotonic clock."""
    seen_ns: int
    """When a tick last showed that its state goes on, by the monotonic clock."""
    over_ns: int = 0
    """Once it has an end: when that is, by the monotonic clock."""
    hold_ns: int = 0
    """For how long it stands at least from when it is sent."""
    begun_ns: int = 0
    """When it began here, by the monotonic clock."""
    unresponsive_ns: int = 0
    """After how long unseen it is dropped while it fires."""
    taken_ns: dict[str, int] = field(default_factory=dict)
    """For each Alertmanager when it last took this alert as it is now, by the monotonic clock."""
    rejected_ns: dict[str, int] = field(default_factory=dict)
    """For each Alertmanager when it last refused this alert as it is now, likewise."""
    change: int = 1
    """The number of the change that made it as it is now."""
    changes: Changes = field(default_factory=Changes)
    """Of the alert, however often it changes."""

    @property
    def is_answered(self) -> bool:
        """Whether an Alertmanager has answered it as it is now, or a later change of it."""
        return self.changes.answered >= self.change

    def hold_until_taken(self, now: Now) -> None:
        """Hold it from now on where nobody has taken it: one that is over is not notified.

        Of one that is refused there is an end to that: it may be refused for ever.
        """
        # Alertmanager takes an alert whose end is past at its first post, and notifies nobody.
        is_given_up = self.rejected_ns and now.monotonic_ns - self.seen_ns >= _REJECTED_NS
        if self.hold_ns and self.ends_ns is not None and not self.taken_ns and not is_given_up:
            self.ends_ns = now.time_ns + self.hold_ns
            self.over_ns = now.monotonic_ns + self.hold_ns

    def answered_ns(self, receiver: str) -> int | None:
        """Return when the Alertmanager last took or refused it, by the monotonic clock."""
        taken_ns, rejected_ns = self.taken_ns.get(receiver), self.rejected_ns.get(receiver)
        if taken_ns is None or rejected_ns is None:
            return rejected_ns if taken_ns is None else taken_ns
        return max(taken_ns, rejected_ns)

    def is_over(self, *, now: Now) -> bool:
        """Return whether nothing more is to be sent of it: it ended, or is unresponsive."""
        # What was polled is acknowledged by the answer to it, so that answer is waited for.
        if self.changes.awaited > self.changes.answered:
            return False
        if self.ends_ns is None:
            return now.monotonic_ns - self.seen_ns >= self.unresponsive_ns
        return now.monotonic_ns - self.over_ns >= _SEND_END_NS

    def as_json(self, *, now: Now, resend_ns: int) -> dict[str, Any]:
        """Return the alert as `/api/v2/alerts` takes it."""
        ends_ns = self.ends_ns
        if ends_ns is None:
            # Alertmanager ends an alert that is not sent again, by its own setting where nothing is
            # said: said here, so that all of a cluster agree, and no restart of ours ends it early.
            ends_ns = now.time_ns + _ENDS_AFTER_RESENDS * resend_ns
        return {
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "startsAt": rfc3339(self.starts_ns),
            # An end before the start is answered 400.
            "endsAt": rfc3339(max(ends_ns, self.starts_ns)),
        }


def rfc3339(time_ns: int) -> str:
    """Write a time as RFC 3339 in UTC, to the microsecond."""
    return (_EPOCH + timedelta(microseconds=time_ns // NS_PER_US)).isoformat()


class ActiveAlerts:
    """All alerts of one partition, by their labels."""

    def __init__(self, *, slots: AlertSlots | None = None) -> None:
        """Take the slots that it shares with other partitions."""
        self._active: dict[Labels, ActiveAlert] = {}
        self._slots = slots or AlertSlots()

    def __iter__(self) -> Iterator[ActiveAlert]:
        """Return each of them."""
        return iter(self._active.values())

    def confirm(self, key: Labels, *, now: Now) -> None:
        """Record that its state goes on."""
        if key in self._active:
            self._active[key].seen_ns = now.monotonic_ns

    def end(self, key: Labels, *, at_ns: int, now: Now) -> None:
        """Let an alert end at `at_ns`, or now where that is still to come."""
        if key in self._active:
            alert = self._active[key]
            # Another object, which nobody has answered: an answer to the firing one that is on its
            # way is no answer to its end.
            self._active[key] = replace(
                alert,
                ends_ns=max(alert.starts_ns, min(at_ns, now.time_ns)),
                # Sent for some minutes from now on, however long ago that was by the node's clock.
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
        """Let an alert stand from `at_ns` for `hold_ns` from now on; one that stands goes on.

        Where too many stand, an older one is dropped: of the same node where that has too many,
        else of the node that has the largest number. Returns whether that was so: where nobody had
        taken it yet, nobody ever hears of it.
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
        """Let an alert stand from `at_ns` until `end_state`, or until unseen for `unresponsive_ns`.

        Slots are given as by `hold`.
        """
        alert, known, _ = self._begin(labels, annotations, at_ns=at_ns, now=now)
        alert.hold_ns, alert.unresponsive_ns = hold_ns, unresponsive_ns
        if known is not None and known.ends_ns is None:
            alert.starts_ns = min(alert.starts_ns, known.starts_ns)
            alert.begun_ns = known.begun_ns

    def _begin(
        self, labels: Mapping[str, str], annotations: Mapping[str, str], *, at_ns: int, now: Now
    ) -> tuple[ActiveAlert, ActiveAlert | None, bool]:
        """Return the alert that begins, what stood of it, and whether an older one had to go."""
        key = _identity(labels)
        node, known = _node_of(key), self._active.get(key)
        going = None if known else self._slots.oldest_to_go(node)
        if going:
            going.owner.drop(going.key)
            self._slots.leave_out(_node_of(going.key))
        self._slots.take(key, node, self)
        # Another object even where it stands: an answer that is on its way is to the former one.
        alert = self._active[key] = ActiveAlert(
            labels=key,
            annotations=_cut(annotations),
            # An alert that began ahead of this clock could not be ended by it.
            starts_ns=min(at_ns, now.time_ns),
            changed_ns=now.monotonic_ns,
            seen_ns=now.monotonic_ns,
            begun_ns=now.monotonic_ns,
            change=known.change + 1 if known else 1,
            changes=known.changes if known else Changes(),
        )
        return alert, known, going is not None

    def end_state(self, key: Labels, *, at_ns: int, now: Now) -> None:
        """Let an alert end that stands for a state, once it has stood for its hold.

        Alertmanager notifies of none that is over before it has looked at it.
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
        """Replace the words of an alert that stands, from when it is sent again."""
        if key in self._active:
            self._active[key].annotations = _cut(annotations)

    def stands(self, key: Labels) -> bool:
        """Return whether an alert fires, or has ended a short while ago."""
        return key in self._active

    def fires(self, key: Labels, *, now: Now) -> bool:
        """Return whether an alert stands and has not ended."""
        alert = self._active.get(key)
        return alert is not None and (alert.ends_ns is None or alert.over_ns > now.monotonic_ns)

    @staticmethod
    def identity_of(labels: Mapping[str, str]) -> Labels:
        """Return the identity of an alert with these labels."""
        return _identity(labels)

    def drop(self, key: Labels) -> ActiveAlert:
        """Forget an alert that stands, whoever waits for it."""
        alert = self._active.pop(key)
        alert.changes.answered = alert.change  # nobody hears of it, nor waits for that
        self._slots.free(key, _node_of(key))
        return alert

    def leave_out(self, node: str) -> None:
        """Count an alert of a node that there is no room for."""
        self._slots.leave_out(node)

    def drop_all(self) -> None:
        """Forget all of them, as of a partition that is given up."""
        for key in list(self._active):
            self.drop(key)

    def not_awaited(self) -> list[ActiveAlert]:
        """Return what nobody has answered, and for whose answer nobody waits yet."""
        return [
            alert
            for alert in self
            if alert.change > max(alert.changes.answered, alert.changes.awaited)
        ]

    def forget(self, *, now: Now) -> list[ActiveAlert]:
        """Drop and return what is over: ended and sent for a while, or firing and long not seen.

        One for whose answer somebody waits is not.
        """
        over = [alert for alert in self if alert.is_over(now=now)]
        for alert in over:
            self.drop(alert.labels)
        return over


def _cut(annotations: Mapping[str, str]) -> dict[str, str]:
    return {name: text[:MAX_CHARACTERS] for name, text in annotations.items()}


def _node_of(key: Labels) -> str:
    labels = dict(key)
    return key_in(labels.get("cluster", ""), labels.get("node", ""))


# Alertmanager takes empty labels away and goes by the rest, in whatever order.
def _identity(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value[:MAX_CHARACTERS]) for name, value in labels.items() if value))


def record_taken(alerts: Iterable[ActiveAlert], receiver: str, *, now: Now) -> None:
    """Record that the Alertmanager has taken these alerts."""
    for alert in alerts:
        alert.taken_ns[receiver] = now.monotonic_ns
        alert.changes.max_together.pop(receiver, None)
        alert.changes.record_answer(alert.change)


def record_rejected(alert: ActiveAlert, receiver: str, *, now: Now) -> bool:
    """Record that the Alertmanager refuses this alert; return whether that is news."""
    is_news = receiver not in alert.rejected_ns
    alert.rejected_ns[receiver] = now.monotonic_ns
    alert.changes.max_together[receiver] = 1
    alert.changes.record_answer(alert.change)
    return is_news


def record_partly_rejected(alerts: Sequence[ActiveAlert], receiver: str) -> None:
    """Record that the Alertmanager refuses some of these: fewer of them are posted together."""
    for alert in alerts:
        alert.changes.max_together[receiver] = (len(alerts) + 1) // 2
