"""The remote-write sink over the bus in memory, with a receiver that answers as configured."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Subscription
from gpuledger.codec import encode
from gpuledger.records import Category, GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.default_topics import EVENTS, READINGS
from tests.unit.gpuledger.ledger.test_health import healthy, readings
from tests.unit.sinks.builders import (
    GPU,
    KEY,
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Received, Receiver, receiving
from tests.unit.sinks.remote_write.oracle import parse_compressed
from tests.unit.sinks.remote_write.sending import (
    AT,
    dropped,
    gauges_of_body,
    is_committed,
    nodes_in,
    publish_at_once,
    sink,
)


def times(receiver: Receiver) -> list[list[int]]:
    """Return, for each request, the distinct times of its samples, in ticks after the first."""
    return [ticks_of_body(r.body) for r in receiver.received]


async def test_waiting_ticks_are_sent_in_order_and_in_few_requests() -> None:
    on = bus()
    await publish(on, *map(event, range(40)))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 40))

        assert [tick for ticks in times(receiver) for tick in ticks] == list(range(40))
        assert len(receiver.received) == 1


async def test_sent_ticks_are_committed_each_interval_even_if_no_more_arrive() -> None:
    on, clock = bus(), ManualClock()
    async with (
        receiving() as receiver,
        running(sink(on, receiver, clock=clock, commit_interval_seconds=5)),
    ):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))  # the first immediately
        await publish(on, event(1))
        await eventually(lambda: len(receiver.received) == 2)
        clock.advance(4.9)
        await publish(on, event(2))
        await eventually(lambda: len(receiver.received) == 3)
        assert is_committed(on, 1)()
        clock.advance(0.1)
        await eventually(is_committed(on, 3))


async def test_a_sink_that_ends_commits_the_sent_ticks_whatever_the_interval() -> None:
    on = bus()
    async with (
        receiving() as receiver,
        running(sink(on, receiver, commit_interval_seconds=3600)),
    ):
        for tick in range(3):
            await publish(on, event(tick))
            await eventually(lambda tick=tick: len(receiver.received) == tick + 1)  # type: ignore[misc]  # mypy knows no type of a default of a lambda
    assert is_committed(on, 3)()


async def test_a_partition_that_waits_delays_no_other() -> None:
    on = bus()
    stuck, goes = (nodes_in(partition)[0] for partition in (0, 1))
    failing = Answer(500, "not this one")

    def answer(body: bytes) -> Answer:
        return failing if stuck in nodes_of_body(body) else Answer(204)

    async with (
        receiving(by_body=answer) as receiver,
        running(sink(on, receiver, poison_seconds=0)),
    ):
        await publish(on, event(0, node=stuck))
        await eventually(lambda: any(stuck in nodes_of_body(r.body) for r in receiver.received))
        await publish(on, *(event(tick, node=goes) for tick in range(5)))
        await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(goes)) == 5)
        assert committed(on, REMOTE_WRITE.group, place_of(stuck)) is None


async def test_a_partition_is_read_no_further_than_its_share_of_the_queue() -> None:
    on = bus()
    stuck, goes = (nodes_in(partition)[0] for partition in (0, 1))
    failing = Answer(500, "not this one")

    def answer(body: bytes) -> Answer:
        return failing if stuck in nodes_of_body(body) else Answer(204)

    event_bytes = len(encode(event(0, node=stuck)))
    bounds: dict[str, Any] = {"queue_bytes": 20 * event_bytes, "max_poll_records": 3}
    async with (
        receiving(by_body=answer) as receiver,
        running(sink(on, receiver, poison_seconds=0, **bounds)),
    ):
        await publish(on, *(event(tick, node=stuck) for tick in range(100)))
        await publish(on, *(event(tick, node=goes) for tick in range(100)))
        await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(goes)) == 100)
        await eventually(lambda: waiting_bytes() >= 5 * event_bytes)
        polls = len(receiver.received)
        await eventually(lambda: len(receiver.received) > polls + 100)
        # Its quarter of the queue, because readings have partitions too, plus a poll.
        assert waiting_bytes() < (5 + 3) * event_bytes


@pytest.mark.parametrize("refused", [{0}, {7}, {3, 4}, {0, 5, 9}, set(range(10))])
async def test_a_rejected_request_is_divided_until_the_rejected_tick_is_separate(
    refused: set[int],
) -> None:
    on = bus()

    def answer(body: bytes) -> Answer:
        return Answer(400, "no such tenant") if refused & set(ticks_of_body(body)) else Answer(204)

    await publish(on, *map(event, range(10)))
    async with receiving(by_body=answer) as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 10))
    found_dead_letters = await dead_letters(on)
    assert {dead_letter.offset for dead_letter in found_dead_letters} == refused
    taken = [tick for body in taken_by(receiver, answer) for tick in ticks_of_body(body)]
    assert taken == sorted(set(range(10)) - refused)


async def test_a_rejected_node_is_sent_separately_until_it_is_accepted_again() -> None:
    on, clock, refused = bus(), ManualClock(), {"bad"}
    bad, good = nodes_in(AT.partition)[:2]

    def answer(body: bytes) -> Answer:
        return Answer(400, "a") if refused and bad in nodes_of_body(body) else Answer(204)

    async with receiving(by_body=answer) as receiver, running(sink(on, receiver, clock=clock)):
        for tick in range(2):
            await publish_at_once(on, event(tick, node=bad), event(tick, node=good))
            await eventually(is_committed(on, 2 * tick + 2))
        alone = [nodes_of_body(r.body) for r in receiver.received if bad in nodes_of_body(r.body)]
        assert alone[-1] == {bad}
        refused.clear()
        for tick in range(2, 4):
            await publish_at_once(on, event(tick, node=bad), event(tick, node=good))
            await eventually(is_committed(on, 2 * tick + 2))
        assert nodes_of_body(receiver.received[-1].body) == {bad, good}


async def test_a_tick_delivered_before_a_crash_counts_as_repeated_and_not_as_lost() -> None:
    on = bus()
    await publish(on, *map(event, range(6)))
    delivered = {0, 1, 2}

    def answer(body: bytes) -> Answer:
        is_old = delivered & set(ticks_of_body(body))
        return Answer(400, "out of order sample") if is_old else Answer(204)

    before = dropped("repeated")
    async with receiving(by_body=answer) as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 6))
    assert dropped("repeated") - before == 3
    assert await dead_letters(on) == []
    taken = [tick for body in taken_by(receiver, answer) for tick in ticks_of_body(body)]
    assert taken == [3, 4, 5]


@pytest.mark.parametrize(
    ("case", "refused", "ticks", "output"),
    [
        ("behind accepted samples", 1, [{}, {}, {}], "out of order sample"),
        ("late according to the join", 0, [{"late": True}, {}, {}], "out of order sample"),
        ("older than the receiver accepts", 0, [{}, {}, {}], "out of bounds"),
    ],
)
async def test_a_tick_that_was_not_delivered_before_does_not_count_as_repeated(
    case: str, refused: int, ticks: list[dict[str, Any]], output: str
) -> None:
    on = bus()
    await publish(on, *(event(tick, **changes) for tick, changes in enumerate(ticks)))

    def answer(body: bytes) -> Answer:
        return Answer(400, output) if refused in ticks_of_body(body) else Answer(204)

    async with receiving(by_body=answer) as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 3))
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.offset, dead_letter.reason) == (refused, "out_of_order"), case


async def test_a_tick_that_always_fails_becomes_a_dead_letter_if_others_succeed() -> None:
    on, clock = bus(), ManualClock()
    stuck, goes = (nodes_in(partition)[0] for partition in (0, 1))

    def answer(body: bytes) -> Answer:
        is_poison = stuck in nodes_of_body(body) and 2 in ticks_of_body(body)
        return Answer(500, "cannot store this") if is_poison else Answer(204)

    async with (
        receiving(by_body=answer) as receiver,
        running(sink(on, receiver, clock=clock, poison_seconds=100, stale_after_seconds=1e9)),
    ):
        await publish(on, *(event(tick, node=stuck) for tick in range(5)))
        for tick in range(10_000):
            if committed(on, REMOTE_WRITE.group, place_of(stuck)) == 5:
                break
            await publish(on, event(tick, node=goes))
            await asyncio.sleep(0.01)
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.offset, dead_letter.reason) == (2, "failing")
    assert "cannot store this" in dead_letter.detail
    assert ticks_taken(receiver, answer, node=stuck) == [0, 1, 3, 4]


async def test_no_tick_becomes_a_dead_letter_while_the_receiver_fails_on_everything() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    async with (
        receiving(by_body=lambda _: Answer(500, "down")) as receiver,
        running(sink(on, receiver, clock=clock, poison_seconds=1)),
    ):
        await eventually(lambda: len(receiver.received) > 50)
        assert clock.now_ns > START_NS + 100 * SECOND_NS
    assert await dead_letters(on) == []
    assert committed(on, REMOTE_WRITE.group, AT) is None


async def test_every_series_has_the_external_labels() -> None:
    on = bus()
    await publish(on, event(0))
    labels = {"replica": "a", "team": "gpu"}
    async with receiving() as receiver, running(sink(on, receiver, external_labels=labels)):
        await eventually(is_committed(on, 1))
    sent = parse_compressed(receiver.received[0].body)
    assert sent
    assert all(one.label(name) == value for one in sent for name, value in labels.items())


async def test_requested_labels_are_only_on_the_info_series() -> None:
    on = bus()
    await publish(on, event(0))
    async with receiving() as receiver, running(sink(on, receiver, pod_labels=["team"])):
        await eventually(is_committed(on, 1))
    sent = parse_compressed(receiver.received[0].body)
    assert {one.name for one in sent if one.label("label_team") == "vision"} == {
        "gpuledger_pod_info"
    }


async def test_the_health_of_gpus_is_sent_from_readings_in_addition_to_events() -> None:
    on, clock = bus(), ManualClock()
    reported = [readings(second, healthy(7), healthy(8, "GPU-b")) for second in range(12)]
    async with on.producer() as producer:
        for one in reported:
            message = Message(key=KEY, value=encode(one), timestamp_ms=one.time_ns // 10**6)
            await producer.publish(READINGS.name, AT.partition, [message])
    await publish(on, event(0))
    of_readings = place_of(NODE, READINGS.name)
    async with receiving() as receiver, running(sink(on, receiver, clock=clock)):
        await eventually(is_committed(on, 1))
        await eventually(lambda: committed(on, REMOTE_WRITE.group, of_readings) == len(reported))

    sent = [one for got in receiver.received for one in parse_compressed(got.body)]
    assert [
        (one.label("gpu_uuid"), one.value, (one.time_ms - START_NS // 10**6) // 1000)
        for one in sent
        if one.name == "gpuledger_gpu_ecc_errors_total"
    ] == [(GPU, 7, 10), ("GPU-b", 8, 10)]
    assert "gpuledger_gpu_up" in {one.name for one in sent}


async def test_readings_that_lag_behind_the_events_are_sent_by_the_next_sink() -> None:
    on = bus()
    of_readings = place_of(NODE, READINGS.name)
    await publish(on, *map(event, range(25)))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 25))
        async with on.producer() as producer:
            for second in range(25):
                reported = readings(second, healthy(7))
                message = Message(key=KEY, value=encode(reported), timestamp_ms=0)
                await producer.publish(READINGS.name, AT.partition, [message])
        before, count = dropped("duplicate"), len(receiver.received)
        async with running(sink(on, receiver)):
            await eventually(lambda: committed(on, REMOTE_WRITE.group, of_readings) == 25)

    sent = [one for got in receiver.received[count:] for one in parse_compressed(got.body)]
    assert [one for one in sent if one.name == "gpuledger_gpu_ecc_errors_total"]
    assert dropped("duplicate") == before


def nodes_of_body(body: bytes) -> set[str | None]:
    return {one.label("node") for one in parse_compressed(body)}


def ticks_of_body(body: bytes) -> list[int]:
    """Return the distinct times of a request's samples, in ticks after the first."""
    first_ms = START_NS // 1_000_000
    return sorted({(one.time_ms - first_ms) // 1000 for one in gauges_of_body(body)})


def taken_by(receiver: Receiver, answer: Callable[[bytes], Answer]) -> list[bytes]:
    """Return the requests with samples that the receiver accepts, given its answers."""
    bodies = (each.body for each in receiver.received)
    return [body for body in bodies if parse_compressed(body) and answer(body).status == 204]


def ticks_taken(receiver: Receiver, answer: Callable[[bytes], Answer], *, node: str) -> list[int]:
    bodies = [body for body in taken_by(receiver, answer) if node in nodes_of_body(body)]
    return [tick for body in bodies for tick in ticks_of_body(body)]


def waiting_bytes() -> float:
    found = REGISTRY.get_sample_value("gpuledger_sink_waiting_bytes", {"sink": "remote_write"})
    return found or 0.0


async def test_nodes_of_one_partition_share_a_request_if_all_ticks_are_new() -> None:
    on = bus()
    same = [f"node-{n}" for n in range(40) if place_of(f"node-{n}") == AT][:3]
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        before = len(receiver.received)
        await publish_at_once(on, *(event(1, node=node) for node in same))
        await eventually(is_committed(on, 4))

        assert len(receiver.received) == before + 1
        nodes = {one.label("node") for one in parse_compressed(receiver.received[-1].body)}
        assert nodes == set(same)


@pytest.mark.parametrize(
    "answers",
    [
        [Answer(503, "away"), Answer(500, "still")],
        [Answer(429, "slower", {"Retry-After": "9"})],
    ],
)
async def test_the_same_request_is_repeated_until_it_is_accepted(answers: list[Answer]) -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0), event(1))
    async with receiving(*answers) as receiver, running(sink(on, receiver, clock=clock)):
        await eventually(is_committed(on, 2))

        assert times(receiver) == [[0, 1]] * (len(answers) + 1)
        attempts = [request.headers.get("Retry-Attempt", "0") for request in receiver.received]
        assert attempts == [str(n) for n in range(len(answers) + 1)]
        assert max(clock.slept) >= (9 if answers[0].status == 429 else 0.25)
        assert await dead_letters(on) == []


async def test_nothing_is_committed_and_the_check_fails_while_the_receiver_is_unavailable() -> None:
    on, readiness = bus(), Readiness()
    await publish(on, event(0))
    answers = [Answer(503, "away")] * 1000
    async with receiving(*answers) as receiver, running(sink(on, receiver, readiness=readiness)):
        await eventually(lambda: len(receiver.received) > 3)

        assert not readiness.check("remote_write.receiver").is_ok
        assert "503 away" in readiness.check("remote_write.receiver").detail
        assert committed(on, REMOTE_WRITE.group, AT) is None


async def test_a_rejected_tick_becomes_a_dead_letter_with_the_receivers_message() -> None:
    on = bus()
    refused, without_samples = Answer(400, "no such tenant"), Answer(204)
    async with (
        receiving(refused, without_samples, refused) as receiver,
        running(sink(on, receiver)),
    ):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        await publish(on, event(1))
        await eventually(is_committed(on, 2))

    assert times(receiver) == [[0], [], [0], [1]]
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.offset, dead_letter.reason, dead_letter.detail) == (
        0,
        "rejected",
        "400 no such tenant",
    )
    assert dead_letter.consumer == REMOTE_WRITE.group


@pytest.mark.parametrize(
    ("refused", "reason", "reports_the_receiver"),
    [("no such tenant", "rejected", True), ("out of order sample", "out_of_order", False)],
)
async def test_a_tick_that_is_only_out_of_order_does_not_fail_the_receivers_check(
    refused: str, reason: str, *, reports_the_receiver: bool
) -> None:
    on, readiness, refusing = bus(), Readiness(), set[str]()
    answer = Answer(400, refused)
    async with (
        receiving(
            by_body=lambda body: answer if refusing and parse_compressed(body) else Answer(204)
        ) as receiver,
        running(sink(on, receiver, readiness=readiness)),
    ):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        refusing.add("samples")
        await publish(on, event(1))
        await eventually(is_committed(on, 2))

    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.reason, dead_letter.detail) == (reason, f"400 {refused}")
    check = readiness.check("remote_write.receiver")
    assert check.has_failed == reports_the_receiver
    shown = f"{receiver.url}/api/v1/write: 400 {refused}"
    output = f"rejected: {shown}; see `gpuledger dead-letters list`"
    assert (output in check.detail) == reports_the_receiver


@pytest.mark.parametrize("status", [400, 401, 405, 426])
async def test_no_event_becomes_a_dead_letter_if_the_receiver_is_replaced_by_another_server(
    status: int,
) -> None:
    on, readiness, is_another = bus(), Readiness(), set[str]()
    answer = Answer(status, "no such thing here")
    async with (
        receiving(by_body=lambda _: answer if is_another else Answer(204)) as receiver,
        running(sink(on, receiver, readiness=readiness)),
    ):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        is_another.add("server")
        await publish(on, event(1), event(2))
        await eventually(lambda: not readiness.check("remote_write.receiver").is_ok)
        assert committed(on, REMOTE_WRITE.group, AT) == 1
        is_another.clear()
        await eventually(is_committed(on, 3))

    assert await dead_letters(on) == []


@pytest.mark.parametrize(
    ("bad", "reason", "detail"),
    [
        (b"{}", "undecodable", "cluster"),
        (event(0, seq=1500, time_ns=START_NS + 301 * SECOND_NS), "future", "time_ns"),
        (event(0, seq=1500, time_ns=5), "invalid", "time_ns: "),
        (
            event(1, seq=1500, entries=[entry(Category.IDLE, allocation=3)]),
            "invalid",
            "allocation: position out of range: 3",
        ),
    ],
)
async def test_an_event_that_cannot_be_sent_becomes_a_dead_letter_and_the_stream_continues(
    bad: object, reason: str, detail: str
) -> None:
    on = bus()
    await publish(on, event(0), bad, event(1))  # type: ignore[arg-type]  # bytes or an event
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 3))

    assert times(receiver) == [[0, 1]]
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.offset, dead_letter.reason) == (1, reason)
    assert detail in dead_letter.detail


async def test_a_tick_published_twice_is_sent_once() -> None:
    on = bus()
    await publish(on, event(0), event(1), event(0), event(1), event(2))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 5))

    assert times(receiver) == [[0, 1, 2]]


async def test_a_sink_that_ends_marks_nothing_stale_because_the_next_owner_continues() -> None:
    on = bus()
    await publish(on, event(0, entries=[entry(Category.IDLE)]))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 1))

        assert times(receiver) == [[0]]


async def test_no_series_of_a_ticking_node_ends_after_an_outage_of_the_receiver() -> None:
    on, clock, is_away = bus(), ManualClock(), {True}
    async with receiving(by_body=lambda _: Answer(503 if is_away else 204)) as receiver:
        await publish(on, event(0))
        async with running(sink(on, receiver, clock=clock)):
            await eventually(lambda: receiver.received)
            await publish(on, *map(event, range(1, 130)))
            await eventually(lambda: clock.now_ns > START_NS + 120 * SECOND_NS)
            is_away.clear()
            await eventually(is_committed(on, 130))

    sent = [one for each in receiver.received for one in parse_compressed(each.body)]
    assert not [one for one in sent if math.isnan(one.value)]


async def test_a_node_whose_ticks_wait_to_be_read_is_not_unresponsive() -> None:
    on, clock = bus(), ManualClock()
    last = next(f"node-{n}" for n in range(99) if place_of(f"node-{n}") == AT)
    async with (
        receiving() as receiver,
        running(sink(on, receiver, clock=clock, max_poll_records=1)),
    ):
        await publish(on, event(0, node=last))
        await eventually(is_committed(on, 1))
        clock.advance(61)
        await publish_at_once(on, *(event(tick) for tick in range(9)), event(1, node=last))
        await eventually(is_committed(on, 11))

    sent = [one for each in receiver.received for one in parse_compressed(each.body)]
    assert not [one for one in sent if math.isnan(one.value)]


async def test_a_partition_lost_during_an_outage_is_not_sent_by_its_former_owner() -> None:
    on, is_away = bus(), {True}
    stays = next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == 0)
    goes = next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == 1)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 204)) as receiver:
        await publish(on, event(0, node=goes))
        with capture_logs() as logged:
            async with running(sink(on, receiver)), another_member(on, logged):
                await publish(on, event(0, node=stays))
                # Anything in flight when the partition was lost has arrived before this.
                await eventually(lambda: stays in nodes_of(receiver.received))
                seen = len(receiver.received)
                is_away.clear()
                at = place_of(stays)
                await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 1)

    assert nodes_of(receiver.received[seen:]) == {stays}


async def test_series_of_unresponsive_nodes_of_a_lost_partition_are_not_ended() -> None:
    on, clock, is_away = bus(), ManualClock(), set[str]()
    goes = next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == 1)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 204)) as receiver:
        await publish(on, event(0, node=goes))
        with capture_logs() as logged:
            async with running(sink(on, receiver, clock=clock)):
                at = place_of(goes)
                await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 1)
                is_away.add("receiver")
                clock.advance(61)
                await eventually(lambda: len(receiver.received) > 1)
                async with another_member(on, logged):
                    seen = len(receiver.received)
                    is_away.clear()
                    stays = next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == 0)
                    await publish(on, event(0, node=stays))
                    at = place_of(stays)
                    await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 1)

    assert nodes_of(receiver.received[seen:]) == {stays}


def nodes_of(received: Iterable[Received]) -> set[str | None]:
    return {one.label("node") for each in received for one in parse_compressed(each.body)}


@asynccontextmanager
async def another_member(on: MemoryBus, logged: Sequence[Mapping[str, Any]]) -> AsyncIterator[None]:
    """Let another member join a sink's group and take its share, once the sink has its own."""

    async def polls() -> None:
        async with on.consumer(
            Subscription(group=REMOTE_WRITE.group, stage=REMOTE_WRITE.name, topics=[EVENTS.name])
        ) as consumer:
            while True:
                await consumer.poll(timeout_seconds=0.01, max_records=1)

    def assignments() -> int:
        of_group = [line["event"] for line in logged if line.get("group") == REMOTE_WRITE.group]
        return of_group.count("partitions_assigned")

    await eventually(lambda: assignments() == 1)
    async with running(polls()):
        await eventually(lambda: assignments() == 2)
        yield


async def test_the_series_of_a_node_that_became_unresponsive_are_ended() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    # No incident is due.
    async with (
        receiving() as receiver,
        running(sink(on, receiver, clock=clock, health_interval_seconds=600)),
    ):
        await eventually(is_committed(on, 1))
        clock.now_ns += 61 * SECOND_NS
        await eventually(lambda: len(receiver.received) == 2)
        await publish(on, event(70))
        await eventually(is_committed(on, 2))

    sent, ended, back = (parse_compressed(request.body) for request in receiver.received)
    assert {one.labels for one in sent} == {one.labels for one in ended}
    assert {one.labels for one in sent} == {one.labels for one in back}
    assert all(math.isnan(one.value) for one in ended)
    assert {one.time_ms for one in ended} == {START_NS // 1_000_000 + 1}


async def test_a_ticking_node_is_not_unresponsive_however_rarely_it_is_sent() -> None:
    on, clock = bus(), ManualClock()
    async with (
        receiving() as receiver,
        running(sink(on, receiver, clock=clock, interval_seconds=60, stale_after_seconds=5)),
    ):
        for tick in range(0, 125, 4):
            await publish(on, event(tick, interval_ns=4 * SECOND_NS))
            clock.now_ns = START_NS + tick * SECOND_NS
            await eventually(lambda: not waiting_bytes())
        await eventually(lambda: len(receiver.received) >= 2)
    sent = [one for got in receiver.received for one in parse_compressed(got.body)]
    assert sent
    assert not [one.name for one in sent if math.isnan(one.value)]


@pytest.mark.parametrize("queue_bytes", [1, 3])
async def test_a_queue_smaller_than_an_event_takes_one_poll_at_a_time(queue_bytes: int) -> None:
    on = bus()
    await publish(on, *map(event, range(5)))
    async with receiving() as receiver, running(sink(on, receiver, queue_bytes=queue_bytes)):
        await eventually(is_committed(on, 5))


async def test_late_ticks_of_an_earlier_boot_are_past_after_a_restart() -> None:
    on, clock = bus(), ManualClock(START_NS + 4000 * SECOND_NS)

    def former(*numbers: int) -> list[GpuEvent]:
        return [event(number, boot_id="boot-0", late=True) for number in numbers]

    def now(*numbers: int) -> list[GpuEvent]:
        return [event(number, seq=1000 * (number - 3000)) for number in numbers]

    await publish(on, *former(1, 2), *now(3601, 3602))
    async with receiving() as receiver:
        async with running(sink(on, receiver, clock=clock)):
            await eventually(is_committed(on, 4))
        await publish(on, *former(3, 4), *now(3603, 3604))
        async with running(sink(on, receiver, clock=clock)):
            await eventually(is_committed(on, 8))
    busy = [
        (one.time_ms, one.value)
        for got in receiver.received
        for one in parse_compressed(got.body)
        if one.name == "gpuledger_gpu_busy_seconds_total" and one.label("category") == "pod"
    ]
    # A counter in the receiver: it never falls.
    assert [value for _, value in sorted(busy)] == sorted(value for _, value in busy)
    assert max(value for _, value in busy) == 4.0


async def test_rejected_readings_are_counted_and_the_next_ones_repeat_them() -> None:
    on, before = bus(), dropped("rejected")
    async with on.producer() as producer:
        for second in range(25):
            reported = encode(readings(second, healthy(7)))
            message = Message(key=KEY, value=reported, timestamp_ms=0)
            await producer.publish(READINGS.name, AT.partition, [message])
    refused = Answer(400, "label too long", {"Content-Type": "text/plain"})

    def answer(body: bytes) -> Answer:
        return refused if parse_compressed(body) else Answer(204)

    of_readings = place_of(NODE, READINGS.name)
    async with receiving(by_body=answer) as receiver, running(sink(on, receiver)):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, of_readings) == 25)
    assert dropped("rejected") > before
    assert await dead_letters(on) == []
