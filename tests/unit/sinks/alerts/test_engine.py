"""Rules over event time, and what Alertmanager is told of them."""

from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.codec import encode
from gpuledger.records import (
    Account,
    AttributedIncident,
    Entry,
    GpuEvent,
    Incident,
    NodeConditions,
    PodDescription,
    PodState,
    Severity,
)
from gpuledger_sinks.alerts.active_alerts import (
    ActiveAlert,
    ActiveAlerts,
    Now,
    record_taken,
    rfc3339,
)
from gpuledger_sinks.alerts.engine import RuleEvaluator
from gpuledger_sinks.alerts.rules import busy_without_pod_ratio, rules_of
from gpuledger_sinks.alerts.send_order import SendOrder
from gpuledger_sinks.alerts.slots import MAX_HELD, AlertSlots
from gpuledger_sinks.settings import AlertsSettings, BusyWithoutPodSettings
from gpuledger_sinks.timelines import TickOrder
from tests.unit.sinks.builders import GPU, NODE, SECOND_NS, START_NS, entry, event, pod

RESEND_NS = 60 * SECOND_NS
AM = "http://am"


def watch(*, for_seconds: float = 3.0, slots: AlertSlots | None = None) -> RuleEvaluator:
    busy = BusyWithoutPodSettings(for_seconds=for_seconds, threshold_ratio=0.1)
    return RuleEvaluator(rules=rules_of(AlertsSettings(busy_without_pod=busy)), slots=slots)


def tick(number: int, *, host_seconds: float | None, node: str = NODE) -> GpuEvent:
    busy_ns = None if host_seconds is None else round(host_seconds * SECOND_NS)
    booked = [entry(Account.HOST, busy_ns=busy_ns), entry(Account.IDLE)]
    return event(number, entries=booked, node=node)


def at(number: float) -> int:
    return START_NS + round(number * SECOND_NS)


def now_at(number: float) -> Now:
    return Now(time_ns=at(number), monotonic_ns=at(number))


def evaluate(of: RuleEvaluator, *host_seconds: float | None, first: int = 0) -> None:
    for number, seconds in enumerate(host_seconds, start=first):
        of.evaluate(tick(number, host_seconds=seconds), now=now_at(number))


def told(of: RuleEvaluator, *, now: float) -> list[ActiveAlert]:
    due = SendOrder(AM, resend_ns=RESEND_NS).next(of.alerts, now=now_at(now))
    record_taken(due, AM, now=now_at(now))
    return due


BUSY, IDLE = 0.5, 0.0


@pytest.mark.parametrize(
    ("host_seconds", "standing"),
    [
        ([BUSY] * 3, None),
        ([BUSY] * 4, "firing"),
        ([BUSY, BUSY, IDLE, BUSY, BUSY], None),
        ([BUSY] * 4 + [IDLE], "ended"),
        ([BUSY] * 4 + [IDLE, BUSY], "ended"),
        ([BUSY] * 4 + [None], "firing"),
        ([BUSY, None, None, BUSY], "firing"),
        ([0.09] * 9, None),
        ([0.1] * 4, "firing"),
    ],
)
def test_an_alert_fires_once_its_condition_has_lasted_by_the_events_time(
    host_seconds: list[float | None], standing: str | None
) -> None:
    watched = watch()
    evaluate(watched, *host_seconds)

    states = ["firing" if alert.ends_ns is None else "ended" for alert in watched.alerts]
    assert states == ([] if standing is None else [standing])


def go_on(before: RuleEvaluator, states: dict[str, NodeConditions | None]) -> RuleEvaluator:
    """Return a new evaluator that knows what the former has written, as the topic carries it."""
    states |= before.take_changed("group")
    after = watch()
    for state in states.values():
        if state is not None:
            after.restore_conditions(msgspec.json.decode(encode(state), type=NodeConditions))
    return after


def firing(of: RuleEvaluator) -> list[tuple[tuple[tuple[str, str], ...], int]]:
    return [(alert.labels, alert.starts_ns) for alert in of.alerts if alert.ends_ns is None]


@given(
    st.lists(st.sampled_from([BUSY, BUSY, BUSY, IDLE, None]), max_size=12),
    st.sets(st.integers(1, 12)),
)
def test_how_long_a_condition_has_held_goes_on_over_restarts(
    host_seconds: list[float | None], restarts: set[int]
) -> None:
    whole, cut, states = watch(), watch(), dict[str, NodeConditions | None]()
    # An alert is sent again once a tick says that its condition still holds.
    for number, seconds in enumerate([*host_seconds, BUSY]):
        if number in restarts:
            cut = go_on(cut, states)
        for watched in (whole, cut):
            watched.evaluate(tick(number, host_seconds=seconds), now=now_at(number))

    assert firing(cut) == firing(whole)


@pytest.mark.parametrize("repeated", [1, 3])
def test_ticks_that_are_read_again_after_a_restart_count_once(repeated: int) -> None:
    before = watch(for_seconds=5.0)
    evaluate(before, BUSY, BUSY, BUSY)
    after = watch(for_seconds=5.0)
    for state in before.take_changed("group").values():
        assert state is not None
        after.restore_conditions(state)

    evaluate(after, *[BUSY] * repeated, first=3 - repeated)
    evaluate(after, BUSY, BUSY, first=3)
    assert not firing(after)
    evaluate(after, BUSY, first=5)
    assert firing(after)


@pytest.mark.parametrize(
    ("for_seconds", "threshold", "fires"), [(3.0, 0.1, True), (2.0, 0.1, True), (3.0, 0.2, False)]
)
def test_a_condition_goes_on_under_another_for_and_begins_anew_under_another_threshold(
    *, for_seconds: float, threshold: float, fires: bool
) -> None:
    before = watch()
    evaluate(before, BUSY, BUSY, BUSY)
    busy = BusyWithoutPodSettings(for_seconds=for_seconds, threshold_ratio=threshold)
    after = RuleEvaluator(rules=rules_of(AlertsSettings(busy_without_pod=busy)))
    for state in before.take_changed("group").values():
        assert state is not None
        after.restore_conditions(state)
    evaluate(after, BUSY, first=3)

    assert bool(firing(after)) == fires


def test_what_holds_no_more_is_written_as_nothing() -> None:
    watched, node = watch(), f"default/{NODE}"
    evaluate(watched, BUSY)
    assert list(watched.take_changed("group")) == [node]
    assert watched.take_changed("group") == {}
    evaluate(watched, IDLE, first=1)
    assert watched.take_changed("group") == {node: None}
    evaluate(watched, IDLE, first=2)
    assert watched.take_changed("group") == {}


@pytest.mark.parametrize(
    ("ticks", "alerts"),
    [
        # Seconds at which ticks end, each of which covers one.
        ([0, 3600], 0),
        ([0, 1, 2, 3600], 0),
        ([0, 1, 2, 3600, 3601, 3602], 0),
        ([0, 1, 2, 3600, 3601, 3602, 3603], 1),
        # A short gap interrupts nothing, and counts for nothing.
        ([0, 30, 60], 0),
        ([0, 30, 60, 90], 1),
        ([0, 1, 32, 33], 1),
        # An alert that stands goes on beyond a gap, as its condition does.
        ([0, 1, 2, 3, 3600], 1),
    ],
)
def test_only_time_that_ticks_cover_counts_and_a_long_gap_begins_anew(
    ticks: list[int], alerts: int
) -> None:
    watched = watch()
    for second in ticks:
        watched.evaluate(tick(second, host_seconds=BUSY), now=now_at(second))

    assert [alert.ends_ns for alert in watched.alerts] == [None] * alerts


@pytest.mark.parametrize("first_seq", [2_500, 20_000], ids=["up less long", "up longer"])
def test_a_condition_that_has_not_fired_begins_anew_with_a_boot(first_seq: int) -> None:
    """`seq` of one boot and of another one differ by nothing that has lasted."""
    watched = watch(for_seconds=3)
    for second in range(3):
        watched.evaluate(
            replace(tick(second, host_seconds=BUSY), seq=2_000 + 1000 * second), now=now_at(second)
        )
    for second in range(3, 7):
        assert list(watched.alerts) == []
        booted = replace(
            tick(second, host_seconds=BUSY), boot_id="boot-2", seq=first_seq + 1000 * second
        )
        watched.evaluate(booted, now=now_at(second))

    assert [alert.starts_ns for alert in watched.alerts] == [at(6)]


def test_a_tick_covers_no_more_than_the_time_since_the_one_before() -> None:
    watched = watch()
    for second in (0, 1):
        made = replace(tick(second, host_seconds=3600 * BUSY), interval_ns=3600 * SECOND_NS)
        watched.evaluate(made, now=now_at(second))

    assert list(watched.alerts) == []


def test_what_cannot_be_measured_after_a_gap_does_not_begin_a_condition() -> None:
    watched = watch()
    evaluate(watched, BUSY)
    evaluate(watched, *[None] * 9, BUSY, first=3600)

    assert list(watched.alerts) == []


def test_ticks_that_come_late_all_at_once_count_by_their_own_time() -> None:
    watched = watch()
    for number in range(4):
        watched.evaluate(tick(number, host_seconds=BUSY), now=now_at(1000))

    (alert,) = watched.alerts
    assert alert.starts_ns == at(3)


def test_a_tick_that_comes_again_changes_nothing() -> None:
    watched = watch()
    evaluate(watched, *[BUSY] * 4)

    assert watched.evaluate(tick(2, host_seconds=IDLE), now=now_at(4)) is TickOrder.REPEATED
    assert [alert.ends_ns for alert in watched.alerts] == [None]


def test_gpus_and_nodes_are_judged_apart() -> None:
    watched = watch(for_seconds=0)
    evaluate(watched, BUSY)
    watched.evaluate(tick(0, host_seconds=BUSY, node="node-b"), now=now_at(0))
    watched.evaluate(tick(1, host_seconds=IDLE, node="node-b"), now=now_at(1))

    ended = {dict(alert.labels)["node"]: alert.ends_ns is not None for alert in watched.alerts}
    assert ended == {NODE: False, "node-b": True}


def test_a_firing_alert_names_the_gpu_and_says_what_was_measured() -> None:
    watched = watch(for_seconds=0)
    evaluate(watched, BUSY)

    (alert,) = told(watched, now=5)
    sent = alert.as_json(now=now_at(5), resend_ns=RESEND_NS)
    assert sent["labels"] == {
        "alertname": "GpuBusyWithoutPod",
        "severity": "warning",
        "cluster": "default",
        "node": NODE,
        "gpu_uuid": GPU,
        "gpu_index": "0",
    }
    assert "busy for 50% of the time" in sent["annotations"]["description"]
    assert sent["startsAt"] == rfc3339(at(0))
    assert sent["endsAt"] == rfc3339(at(5) + 4 * RESEND_NS)


def test_a_firing_alert_is_told_again_and_again_and_its_end_for_five_minutes() -> None:
    watched = watch(for_seconds=0)
    evaluate(watched, BUSY)

    assert [len(told(watched, now=now)) for now in (0, 30, 60, 119, 120)] == [1, 0, 1, 0, 1]

    evaluate(watched, IDLE, first=130)
    assert [len(told(watched, now=now)) for now in (130, 131, 190)] == [1, 0, 1]
    watched.forget(now=now_at(429), silent_ns=900 * SECOND_NS)
    assert len(list(watched.alerts)) == 1
    watched.forget(now=now_at(430), silent_ns=900 * SECOND_NS)
    assert len(list(watched.alerts)) == 0


def test_an_end_is_when_the_condition_ended_and_never_ahead_of_the_clock() -> None:
    watched = watch(for_seconds=0)
    watched.evaluate(tick(100, host_seconds=BUSY), now=now_at(10))
    watched.evaluate(tick(101, host_seconds=IDLE), now=now_at(11))

    (alert,) = watched.alerts
    assert (alert.starts_ns, alert.ends_ns) == (at(10), at(11))


def test_an_alert_of_a_gpu_that_fell_silent_is_dropped_and_begins_anew() -> None:
    watched = watch(for_seconds=0)
    evaluate(watched, BUSY)

    assert watched.forget(now=now_at(899), silent_ns=900 * SECOND_NS) == 0
    assert watched.forget(now=now_at(900), silent_ns=900 * SECOND_NS) == 1
    evaluate(watched, BUSY, first=1000)
    (alert,) = watched.alerts
    assert alert.starts_ns == at(1000)


@pytest.mark.parametrize(
    ("entries", "ratio"),
    [
        ([entry(Account.HOST, busy_ns=200_000_000), entry(Account.UNATTRIBUTED)], 0.7),
        ([entry(Account.POD), entry(Account.IDLE)], 0.0),
        ([entry(Account.IDLE, holder=one) for one in (0, 1)], 0.0),
        ([entry(Account.HOST, busy_ns=None), entry(Account.IDLE)], None),
        ([entry(Account.HOST, busy_ns=None)], None),
        ([], None),
    ],
)
def test_only_what_is_booked_on_host_or_nobody_counts(
    entries: list[Entry], ratio: float | None
) -> None:
    (books,) = event(entries=entries).gpus

    assert busy_without_pod_ratio(books, SECOND_NS) == ratio


def test_without_an_interval_nothing_is_measured() -> None:
    (books,) = event().gpus

    assert busy_without_pod_ratio(books, 0) is None


def incident(*, time_ns: int = START_NS, pods: Any = (), **changes: Any) -> AttributedIncident:  # noqa: ANN401  # a record's fields
    values: dict[str, Any] = {
        "cluster": "default",
        "node": NODE,
        "boot_id": "boot-1",
        "gpu_uuid": GPU,
        "gpu_index": 3,
        "time_ns": time_ns,
        "kind": "xid",
        "source": "nvml",
        "severity": Severity.CRITICAL,
        "xid": 79,
        "message": "GPU has fallen off the bus",
        "processes": [],
    }
    return AttributedIncident(incident=Incident(**(values | changes)), pods=list(pods))


def held(*incidents: AttributedIncident, now: float = 0) -> list[dict[str, Any]]:
    watched = watch()
    for one in incidents:
        watched.add_incident(one, hold_ns=300 * SECOND_NS, now=now_at(now))
    return [one.as_json(now=now_at(now), resend_ns=RESEND_NS) for one in told(watched, now=now)]


def test_an_incident_is_an_alert_with_its_xid_and_its_first_known_pod() -> None:
    pods: list[PodDescription] = [
        pod(state=PodState.PENDING, name=None, namespace=None),
        pod(),
        pod(name="other"),
    ]

    (sent,) = held(incident(pods=pods))

    assert sent["labels"] == {
        "alertname": "GpuIncident",
        "severity": "critical",
        "cluster": "default",
        "node": NODE,
        "gpu_uuid": GPU,
        "gpu_index": "3",
        "kind": "xid",
        "xid": "79",
        "namespace": "research",
        "pod": "train-0",
        "owner_kind": "StatefulSet",
        "owner_name": "train",
    }
    assert sent["annotations"] == {
        "summary": (
            "GPU 3 on node node-a (pods uid-train, research/train-0, research/other): "
            "XID 79, GPU has fallen off the bus"
        ),
        "description": "GPU has fallen off the bus",
        "pods": "uid-train, research/train-0, research/other",
    }


def test_labels_without_a_value_are_left_out() -> None:
    (sent,) = held(incident(kind="gpu_lost", xid=None, gpu_index=None, message="It is lost"))

    assert sent["labels"].keys() == {"alertname", "severity", "cluster", "node", "gpu_uuid", "kind"}
    assert sent["annotations"]["summary"] == f"{GPU} on node node-a: gpu_lost, It is lost"


@pytest.mark.parametrize(("now", "ends"), [(0, 300), (200, 500)])
def test_an_incident_stands_for_its_hold_from_when_it_could_first_be_told(
    now: float, ends: float
) -> None:
    (sent,) = held(incident(), now=now)

    assert sent["startsAt"] == rfc3339(at(0))
    assert sent["endsAt"] == rfc3339(at(ends))


@pytest.mark.parametrize("ahead_seconds", [240, 3600, 365 * 86_400])
def test_an_incident_from_the_future_stands_for_its_hold_and_no_longer(ahead_seconds: int) -> None:
    watched = watch()
    taken = incident(time_ns=at(ahead_seconds))
    watched.add_incident(taken, hold_ns=300 * SECOND_NS, now=now_at(0))
    (alert,) = watched.alerts
    sent = alert.as_json(now=now_at(0), resend_ns=RESEND_NS)
    assert (sent["startsAt"], sent["endsAt"]) == (rfc3339(at(0)), rfc3339(at(300)))
    watched.forget(now=now_at(600), silent_ns=900 * SECOND_NS)
    assert list(watched.alerts) == []


@pytest.mark.parametrize("back_seconds", [0, 60, 3600])
def test_what_a_clock_was_set_back_is_no_age_of_an_incident(back_seconds: int) -> None:
    watched = watch()
    for number in range(6):
        shown_ns = at(number) - (back_seconds * SECOND_NS if number >= 3 else 0)
        made = event(number, time_ns=shown_ns)
        watched.evaluate(made, now=now_at(number))
    taken = incident(time_ns=at(5 - back_seconds))
    assert watched.age_ns(taken, now=now_at(7)) == 2 * SECOND_NS


def test_how_far_a_clock_is_behind_after_a_reboot_is_no_age_of_an_incident() -> None:
    """But for the time since the last tick of the boot before."""
    watched, back_seconds = watch(), 3600
    watched.evaluate(event(5), now=now_at(5))
    booted = event(boot_id="boot-2", seq=20_000, time_ns=at(70 - back_seconds))
    assert watched.evaluate(booted, now=now_at(70)) is TickOrder.CURRENT

    taken = incident(boot_id="boot-2", time_ns=at(70 - back_seconds))
    assert watched.age_ns(taken, now=now_at(72)) == (2 + 70 - 20 - 5) * SECOND_NS


def test_the_end_of_an_alert_is_told_however_long_ago_it_was_by_the_nodes_clock() -> None:
    watched = watch(for_seconds=0)
    watched.evaluate(tick(0, host_seconds=BUSY), now=now_at(7200))
    told(watched, now=7200)
    watched.evaluate(tick(1, host_seconds=IDLE), now=now_at(7201))
    watched.forget(now=now_at(7201), silent_ns=900 * SECOND_NS)
    (ended,) = told(watched, now=7201)
    assert ended.ends_ns == at(1)


def test_this_machines_wall_clock_moves_no_interval() -> None:
    """Set back an hour, it still sends what stands every minute."""
    watched = watch(for_seconds=0)
    evaluate(watched, BUSY)
    told(watched, now=0)
    back = Now(time_ns=at(-3600), monotonic_ns=at(60))
    (again,) = SendOrder(AM, resend_ns=RESEND_NS).next(watched.alerts, now=back)
    sent = again.as_json(now=back, resend_ns=RESEND_NS)
    assert sent["startsAt"] <= sent["endsAt"]


def test_the_same_incident_again_prolongs_one_alert() -> None:
    (sent,) = held(incident(), incident(time_ns=at(100)), now=100)

    assert (sent["startsAt"], sent["endsAt"]) == (rfc3339(at(0)), rfc3339(at(400)))


def test_times_are_written_as_rfc_3339_in_utc() -> None:
    assert rfc3339(1_500_000_000_123_456_789) == "2017-07-14T02:40:00.123456+00:00"
    assert datetime.fromisoformat(rfc3339(0)).timestamp() == 0


def test_an_alert_that_is_left_out_is_told_of_once_and_fires_when_there_is_room() -> None:
    slots = AlertSlots()
    of, others = watch(slots=slots), ActiveAlerts(slots=slots)
    for number in range(MAX_HELD):
        others.fire({"node": f"n{number}"}, {}, since_ns=START_NS, now=now_at(0))

    evaluate(of, *[BUSY] * 6)
    assert (list(of.alerts), slots.take_left_out()) == ([], (1, f"default/{NODE}"))
    evaluate(of, BUSY, first=6)
    assert slots.take_left_out().number == 0
    others.drop_all()
    evaluate(of, BUSY, first=7)
    assert len(list(of.alerts)) == 1


def test_an_alert_that_gave_way_fires_again_when_there_is_room_and_ends_with_its_condition() -> (
    None
):
    of = watch()
    evaluate(of, *[BUSY] * 6)
    (alert,) = of.alerts
    of.alerts.drop(alert.labels)
    evaluate(of, BUSY, first=6)
    assert len(list(of.alerts)) == 1
    evaluate(of, IDLE, first=7)
    (alert,) = of.alerts
    assert alert.ends_ns == at(7)
