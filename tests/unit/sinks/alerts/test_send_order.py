"""The order in which an Alertmanager gets alerts: new ones first, and none delays the others."""

from collections.abc import Callable, Sequence

from gpuledger_sinks.alerts.active_alerts import (
    ActiveAlert,
    ActiveAlerts,
    Now,
    record_partly_rejected,
    record_rejected,
    record_taken,
)
from gpuledger_sinks.alerts.send_order import MAX_TOGETHER, SendOrder
from tests.unit.sinks.builders import SECOND_NS, START_NS

AM = "am"
RESEND_SECONDS = 60


def at(seconds: float) -> Now:
    time_ns = START_NS + round(seconds * SECOND_NS)
    return Now(time_ns=time_ns, monotonic_ns=time_ns)


class Alertmanager:
    """An Alertmanager whose every answer takes the given time."""

    def __init__(self, *, seconds: float = 0.0, refuses: Callable[[str], bool]) -> None:
        self.alerts = ActiveAlerts()
        self.turns = SendOrder(AM, resend_ns=RESEND_SECONDS * SECOND_NS)
        self.posts: list[list[str]] = []
        self._seconds, self._refuses = seconds, refuses
        self.now = 0.0

    def begin(self, *names: str) -> None:
        for name in names:
            labels, now = {"alertname": name, "node": name}, at(self.now)
            self.alerts.hold(labels, {}, at_ns=START_NS, hold_ns=3600 * SECOND_NS, now=now)

    def post(self) -> list[str]:
        """Post the next alerts; return their names."""
        alerts = self.turns.next(self.alerts, now=at(self.now))
        self.now += self._seconds
        names = [dict(alert.labels)["alertname"] for alert in alerts]
        self._answer(alerts, names)
        if names:
            self.posts.append(names)
        return names

    def post_all(self) -> int:
        """Post until nothing is due; return how many posts that took."""
        before = len(self.posts)
        while self.post():
            pass
        return len(self.posts) - before

    def _answer(self, alerts: Sequence[ActiveAlert], names: Sequence[str]) -> None:
        if not any(map(self._refuses, names)):
            record_taken(alerts, AM, now=at(self.now))
        elif len(alerts) > 1:
            record_partly_rejected(alerts, AM)
        else:
            record_rejected(alerts[0], AM, now=at(self.now))


def bad(name: str) -> bool:
    return name.startswith("bad")


def never(name: str) -> bool:
    return not name


def test_new_alerts_are_sent_before_all_that_are_resent() -> None:
    am = Alertmanager(seconds=1.0, refuses=never)
    for number in range(140):  # one per second: with every answer another one is due again
        am.begin(f"old-{number}")
        am.post()
    am.now += 60

    for number in range(20):
        am.begin(f"new-{number}")
        assert am.post() == [f"new-{number}"]


def test_alerts_that_began_one_after_another_are_resent_together() -> None:
    am = Alertmanager(seconds=1.0, refuses=never)
    for number in range(25):
        am.begin(f"old-{number}")
        am.post()
    am.now += 40

    assert am.post_all() == 1
    assert len(am.posts[-1]) == 25


def test_no_active_alert_waits_longer_than_twice_the_interval_while_others_arrive() -> None:
    am = Alertmanager(seconds=1.0, refuses=bad)
    am.begin(*(f"good-{number}" for number in range(50)), *(f"bad-{n}" for n in range(100)))
    reported: dict[str, float] = {}
    for _ in range(600):
        posted = am.post()
        for name in posted if not any(map(bad, posted)) else ():
            assert am.now - reported.get(name, am.now) <= 2 * RESEND_SECONDS
            reported[name] = am.now
    assert len(reported) == 50


def test_most_good_alerts_of_a_rejected_request_are_delivered_soon() -> None:
    am = Alertmanager(refuses=bad)
    names = [f"good-{number}" for number in range(MAX_TOGETHER - 1)]
    am.begin(*names[:77], "bad", *names[77:])
    posts = am.post_all()

    taken = [name for post in am.posts if "bad" not in post for name in post]
    assert sorted(taken) == sorted(names)
    assert posts <= 2 * 8 + 1
    assert len([name for post in am.posts[:5] if "bad" not in post for name in post]) > 190


def test_an_alert_that_was_rejected_separately_is_resent_separately_at_its_interval() -> None:
    am = Alertmanager(refuses=bad)
    am.begin("good", "bad-1", "bad-2")
    am.post_all()
    am.now += RESEND_SECONDS
    seen = len(am.posts)
    am.post_all()

    assert sorted(am.posts[seen:]) == [["bad-1"], ["bad-2"], ["good"]]


def test_a_rejected_alert_that_changes_does_not_take_new_ones_down_with_it() -> None:
    am = Alertmanager(refuses=bad)
    am.begin("bad")
    am.post_all()
    am.begin("bad", "good")

    assert am.post() == ["good"]
    assert am.post() == ["bad"]


def test_new_alerts_are_delivered_while_others_are_being_rejected() -> None:
    am = Alertmanager(seconds=0.06, refuses=bad)
    am.begin(*(f"bad-{number}" for number in range(600)))
    for _ in range(3):
        am.post()
    am.begin("good")

    assert am.post() == ["good"]


def test_the_lateness_of_an_alertmanager_excludes_alerts_that_it_rejects() -> None:
    am = Alertmanager(refuses=bad)
    am.begin("good", "bad")
    am.post_all()
    assert am.turns.late_ns <= 0
    am.now += 500
    am.turns.is_due(am.alerts, now=at(am.now))
    assert am.turns.late_ns == (500 - RESEND_SECONDS) * SECOND_NS
