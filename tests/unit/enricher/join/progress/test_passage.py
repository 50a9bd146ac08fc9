"""Ticks in time: gaps, lateness, and clocks that disagree."""

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger_enricher.join.observer import WindowedMin
from gpuledger_enricher.join.progress.passage import partition_watermark
from tests.default_topics import PODS
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, pod, record, sample

HOUR_NS = 3600 * SECOND_NS
DAY_NS = 24 * HOUR_NS


@pytest.fixture
def given() -> Given:
    return Given()


GAPS = [
    ("the ticks meet", {"seq": 2000}, None),
    ("the clocks are read one after the other", {"seq": 2040}, None),
    ("one tick is missing", {"seq": 3000}, 1.0),
    ("the clock was set forward meanwhile", {"seq": 2000, "time_ns": T_NS + 9 * SECOND_NS}, None),
    ("the clock was set back meanwhile", {"seq": 3000, "time_ns": T_NS - SECOND_NS}, 1.0),
    ("the node was down", {"boot_id": "b", "seq": 5, "time_ns": T_NS + 90 * SECOND_NS}, 89.0),
    ("the node was down, its clock is behind", {"boot_id": "b", "seq": 5, "time_ns": T_NS}, None),
]


@pytest.mark.parametrize(("case", "changes", "seconds"), GAPS)
def test_time_that_no_tick_covers_is_a_gap_of_the_next_event(
    given: Given, case: str, changes: dict[str, object], seconds: float | None
) -> None:
    """The gap is reported and not filled: a tick of one second is booked as one second."""
    assert given.take(seq=1000, time_ns=T_NS).gap_ns is None
    event = given.take(**changes)
    assert event.gap_ns == (None if seconds is None else seconds * SECOND_NS), case
    assert event.interval_ns == SECOND_NS


def test_a_gap_is_found_across_workers(given: Given) -> None:
    """The previous worker's watermark is the beginning of the gap."""
    given.take(seq=1000)
    successor = Given()
    successor.stage.restore_progress(
        [record(one.value, topic="watermarks") for one in given.stage.drain_progress(3)]
    )
    assert successor.take(seq=4000).gap_ns == 2 * SECOND_NS


def test_a_tick_that_could_not_be_booked_is_a_gap(given: Given) -> None:
    """Its time is not attributed."""
    given.take(seq=1000)
    assert given.stage.take_samples([record(sample(seq=2000, interval_ns=0), offset=9)]) == []
    assert given.take(seq=3000).gap_ns == SECOND_NS


def test_gaps_are_counted_with_their_duration(given: Given) -> None:
    before = [value_of(f"gpuledger_join_{name}_total") for name in ("gaps", "gap_seconds")]
    for seq in (1000, 2000, 4500, 7000):
        given.take(seq=seq)
    after = [value_of(f"gpuledger_join_{name}_total") for name in ("gaps", "gap_seconds")]
    assert [after[0] - before[0], after[1] - before[1]] == [2, 3.0]


def clock_steps() -> list[float]:
    name = "gpuledger_join_clock_steps_total"
    ways = ("ahead", "back")
    return [REGISTRY.get_sample_value(name, {"direction": way}) or 0.0 for way in ways]


DAYS = 20
STEPS = [
    ("nothing", {"seq": 2000, "time_ns": T_NS + SECOND_NS}, None),
    ("four minutes ahead", {"seq": 2000, "time_ns": T_NS + 241 * SECOND_NS}, ("ahead", 240)),
    ("an hour back", {"seq": 2000, "time_ns": T_NS + SECOND_NS - HOUR_NS}, ("back", -3600)),
    ("half a second of NTP", {"seq": 2000, "time_ns": T_NS + 3 * SECOND_NS // 2}, None),
    (
        "drift while the agent was away",
        {"seq": 1000 + DAYS * 86_400_000, "time_ns": T_NS + DAYS * DAY_NS + 60 * SECOND_NS},
        None,
    ),
    ("a reboot", {"boot_id": "b", "seq": 5000, "time_ns": T_NS + 90 * SECOND_NS}, None),
    ("a reboot into 1970", {"boot_id": "b", "seq": 5000, "time_ns": 5 * SECOND_NS}, ("back", None)),
]


@pytest.mark.parametrize(("case", "changes", "step"), STEPS)
def test_a_clock_change_is_counted_and_logged(
    given: Given, case: str, changes: dict[str, object], step: tuple[str, float | None] | None
) -> None:
    """Later timestamps belong to another timeline; booking follows `seq`."""
    given.take(seq=1000, time_ns=T_NS)
    before = clock_steps()
    given.wait(30 * 86_400)
    with capture_logs() as logs:
        given.take(**changes)
    after = clock_steps()
    reported = [line for line in logs if line["event"] == "node_clock_stepped"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        step is not None and step[0] == way for way in ("ahead", "back")
    ], case
    assert [line["node"] for line in reported] == (["node-a"] if step else [])
    if step and step[1]:
        assert reported[0]["by_seconds"] == step[1]


def test_a_clock_that_is_set_ahead_and_back_is_logged_at_once_but_not_for_every_tick(
    given: Given,
) -> None:
    """At once, because there may be no later tick."""
    with capture_logs() as logs:
        for seq in range(1000, 10_000, 1000):
            ahead_ns = 600 * SECOND_NS if seq // 1000 % 2 else 0
            for node in ("node-a", "node-b"):
                given.take(node=node, seq=seq, time_ns=T_NS + seq * 10**6 + ahead_ns)

    reported = [line for line in logs if line["event"] == "node_clock_stepped"]
    assert [(line["node"], line["by_seconds"], line["count"]) for line in reported] == [
        ("node-a", -600, 1),
        ("node-b", -600, 1),
        ("node-a", 600, 1),
        ("node-b", 600, 1),
    ]


DAY_MS = DAY_NS // 10**6
TWO_DAYS = 2 * 86_400.0
# `seq`, how long after the first tick it is read, and how much later its record is stamped.
AHEAD: list[tuple[str, dict[str, object], tuple[int, int], float | None]] = [
    ("the next tick", {"seq": 2000}, (1000, 1000), None),
    ("the agent was away for twenty days", {"seq": 20 * DAY_MS}, (20 * DAY_MS, 20 * DAY_MS), None),
    ("away, and the clock set back by years", {"seq": 20 * DAY_MS}, (20 * DAY_MS, -999_999), None),
    ("a backlog of twenty days read at once", {"seq": 20 * DAY_MS}, (0, 20 * DAY_MS), None),
    ("a day ahead", {"seq": 1000 + DAY_MS}, (0, 0), None),
    ("more than a day ahead", {"seq": 2000 + DAY_MS}, (0, 0), 86_401.0),
    ("two days ahead", {"seq": 1000 + 2 * DAY_MS}, (0, 0), TWO_DAYS),
    ("more than two days ahead", {"seq": 2000 + 2 * DAY_MS}, (0, 0), TWO_DAYS + 1),
    ("three days, stamped a day ahead", {"seq": 1000 + 3 * DAY_MS}, (0, DAY_MS), TWO_DAYS),
    ("ten years", {"seq": 3660 * DAY_MS, "time_ns": 2**62}, (0, DAY_MS), 316_137_599.0),
    ("another boot", {"boot_id": "b", "seq": 3660 * DAY_MS}, (0, 0), None),
]


@pytest.mark.parametrize(("case", "changes", "times_ms", "ahead_seconds"), AHEAD)
async def test_a_seq_that_runs_ahead_is_logged_and_beyond_two_days_refused(
    given: Given,
    case: str,
    changes: dict[str, object],
    times_ms: tuple[int, int],
    ahead_seconds: float | None,
) -> None:
    """A refused tick does not move the watermark, so the next tick is booked."""
    given.take(seq=1000, time_ns=T_NS)
    before = value_of("gpuledger_join_seq_ahead_total")
    read_ms, stamped_ms = times_ms
    given.wait(read_ms / 1000)
    tick = record(sample(**changes), offset=2)
    with capture_logs() as logs:
        stamped = tick._replace(timestamp_ms=T_NS // 10**6 + stamped_ms)
        events = given.stage.take_samples([stamped])
    reported = [line["by_seconds"] for line in logs if line["event"] == "node_seq_leapt"]
    assert reported == ([] if ahead_seconds is None else [ahead_seconds]), case
    assert value_of("gpuledger_join_seq_ahead_total") - before == len(reported)
    is_refused = (ahead_seconds or 0.0) > TWO_DAYS
    assert len(events) == (0 if is_refused else 1), case
    dead_letters = await given.rejected_records()
    assert [
        (dead_letter.reason, "node-a" in dead_letter.detail) for dead_letter in dead_letters
    ] == ([("seq_ahead", True)] * is_refused)
    if is_refused:
        assert given.take(seq=2000).seq == 2000


async def test_a_seq_of_an_earlier_boot_cannot_run_ahead_either(given: Given) -> None:
    """Not even if another boot came in between, or after the next worker has read the progress."""
    given.take(boot_id="one", seq=1000)
    given.take(boot_id="two", seq=1000)
    watermarks = given.stage.drain_progress(3)
    given.read_watermarks(watermarks)
    assert given.offer(boot_id="one", seq=5 * DAY_MS) == []
    given.stage.forget(3)
    given.read_watermarks(watermarks)
    assert given.offer(boot_id="one", seq=5 * DAY_MS) == []
    assert given.offer(boot_id="two", seq=5 * DAY_MS) == []
    assert given.take(boot_id="one", seq=2000).seq == 2000
    assert [dead_letter.reason for dead_letter in await given.rejected_records()] == [
        "seq_ahead"
    ] * 3


def test_a_tick_that_the_node_sent_late_is_late(given: Given) -> None:
    """The node's own flag is passed on."""
    assert given.take(late=True).late is True
    assert given.take(seq=2000).late is None


LATE = [(0, None), (29, None), (31, True), (3000, True), (-3000, None)]


@pytest.mark.parametrize(("behind_seconds", "late"), LATE)
def test_a_tick_far_behind_the_others_of_its_partition_is_late(
    given: Given, behind_seconds: int, late: object
) -> None:
    """For example if it stayed on its node's disk because Kafka was unreachable from there."""
    given.take(node="node-a")
    behind = T_NS - behind_seconds * SECOND_NS
    assert given.take(node="node-b", time_ns=behind).late is late
    assert given.take(node="node-b", time_ns=behind).late is late


def test_a_clock_that_runs_ahead_makes_no_other_node_late(given: Given) -> None:
    """No time is newer than now, so the other nodes are unaffected."""
    given.take(node="ahead", time_ns=T_NS + DAY_NS)
    assert given.take(node="node-b").late is None
    assert given.take(node="node-c").late is None


def test_some_clocks_ahead_make_no_other_node_late_in_a_backlog() -> None:
    """In a backlog, times ahead may be before now; one node in ten may run ahead."""
    newest = [T_NS] * 18 + [T_NS + HOUR_NS // 2] * 2
    assert partition_watermark(newest, now_ns=T_NS + HOUR_NS) == T_NS


def test_a_node_that_no_longer_ticks_delays_nothing() -> None:
    """Nodes unresponsive for more than an hour do not count, however many they are."""
    assert partition_watermark([T_NS - 2 * HOUR_NS] * 99 + [T_NS], now_ns=T_NS) == T_NS


def test_most_of_a_partition_can_be_late() -> None:
    """Nodes that were cut off for ten minutes are compared with those that were not."""
    newest = [T_NS - 600 * SECOND_NS] * 80 + [T_NS] * 20
    assert partition_watermark(newest, now_ns=T_NS) == T_NS


def test_a_node_not_seen_for_a_day_is_forgotten_for_good(given: Given) -> None:
    """Its watermark on the topic is deleted too; a node that still ticks keeps its own."""
    given.take(node="gone")
    given.take(node="stays")
    given.stage.drain_progress(3)
    given.now_ns += DAY_NS + SECOND_NS
    for _ in range(3):
        given.take(node="stays", time_ns=T_NS + DAY_NS)
    left = {message.key: message.value for message in given.stage.drain_progress(3)}
    assert left[b"default/gone"] is None
    assert left[b"default/stays"] is not None


def test_a_node_whose_clock_is_years_behind_keeps_its_watermark(given: Given) -> None:
    """How long a node was unresponsive is measured by the worker's clock."""
    for number in range(1, 4):
        given.take(node="old", seq=1000 * number, time_ns=SECOND_NS)
    assert given.stage.take_samples([record(sample(node="old", seq=3000), offset=99)]) == []


def test_a_tick_from_the_future_shows_a_clock_that_is_ahead(given: Given) -> None:
    """The minimum age is negative by at least that much; it is forgotten after ten minutes."""
    given.take(seq=1000, time_ns=T_NS + 5 * SECOND_NS)
    assert value_of("gpuledger_join_min_sample_age_seconds") == -5.0
    for minutes in (6, 12):
        given.now_ns = T_NS + minutes * 60 * SECOND_NS
        given.take(seq=minutes * 60_000, time_ns=given.now_ns - SECOND_NS)
    assert value_of("gpuledger_join_min_sample_age_seconds") == 1.0


STARTED = [(0, None, 0.0), (-4, None, 4.0), (-4, "a" * 32, 0.0)]


@pytest.mark.parametrize(("lead_seconds", "config_hash", "shown"), STARTED)
def test_a_pod_that_ran_before_its_creation_shows_a_node_behind_the_api_server(
    given: Given, lead_seconds: int, config_hash: str | None, shown: float
) -> None:
    """A static pod really runs before the API server knows it."""
    given.stage.take_pods([record(pod(started_time_ns=pod().created_time_ns), topic=PODS.name)])
    given.now_ns += HOUR_NS
    given.stage.take_pods([record(pod(started_time_ns=pod().created_time_ns), topic=PODS.name)])
    started_ns = pod().created_time_ns + lead_seconds * SECOND_NS
    odd = pod(1, started_time_ns=started_ns, config_hash=config_hash)
    given.stage.take_pods([record(odd, topic=PODS.name)])
    assert value_of("gpuledger_join_node_behind_api_server_seconds") == shown


def test_only_the_minimum_of_two_windows_is_kept() -> None:
    """A clock that is set back starts a new window and does not stop it."""
    minimum = WindowedMin()
    minimum.add(1, now_ns=T_NS)
    minimum.add(2, now_ns=T_NS + 301 * SECOND_NS)
    assert minimum.minimum == 1
    minimum.add(3, now_ns=T_NS + 602 * SECOND_NS)
    assert minimum.minimum == 2
    minimum.add(9, now_ns=T_NS - DAY_NS)
    minimum.add(8, now_ns=T_NS - DAY_NS + 301 * SECOND_NS)
    minimum.add(8, now_ns=T_NS - DAY_NS + 602 * SECOND_NS)
    assert minimum.minimum == 8
