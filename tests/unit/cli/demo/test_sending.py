"""The result of a sink's deliveries, in words."""

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.clock import Clock
from gpuledger.runtime import Readiness
from gpuledger_cli.demo.sending import SinkWatch, problem
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_simulator.clock import ManualClock
from gpuledger_sinks.metrics import RETRIES_TOTAL
from tests.default_topics import EVENTS


async def failing(*details: str) -> str:
    """Return the text about a sink whose checks have these details."""

    async def fail(*, bus: BusView, readiness: Readiness, clock: Clock) -> None:
        del bus, clock
        for number, detail in enumerate(details):
            readiness.check(f"check-{number}").failed(detail)
        RETRIES_TOTAL.labels(sink="nowhere").inc(2)

    watch = SinkWatch(
        sink="nowhere",
        receiver="http://a:9",
        bus=BusView(MemoryBus()),
        work=fail,
    )
    await watch.run(ManualClock(start_ns=0))
    return problem(watch.line(), events=1) or ""


async def test_equal_details_of_several_checks_are_shown_once() -> None:
    message = "nowhere: nothing delivered to http://a:9 in 2 attempts: no route; Kafka is away"
    assert await failing(*["http://a:9: no route"] * 2, "Kafka is away") == message


async def test_a_long_response_keeps_its_first_and_last_words() -> None:
    message = await failing("refused: " + "word " * 90 + "at the end")
    assert " … " in message
    assert message.endswith("word at the end")


@pytest.mark.parametrize("gathers", [False, True])
async def test_a_sink_may_end_once_it_has_delivered_or_if_it_delivers_when_it_ends(
    *, gathers: bool
) -> None:
    """If it ended between its poll and its delivery, the last events would be missing."""
    place = TopicPartition(EVENTS.name, 0)

    async def work(**_: object) -> None:
        """Take nothing."""

    bus = BusView(MemoryBus())
    watch = SinkWatch(sink="nowhere", receiver="http://a:9", bus=bus, work=work, gathers=gathers)
    last = [(place, 4)]
    async with bus.consumer(Subscription(group="g", topics=[EVENTS.name])):
        assert not watch.may_end(last)
        bus.polled[place] = 5
        assert watch.may_end(last) is gathers
        bus.committed[place] = 5
        assert watch.may_end(last)
