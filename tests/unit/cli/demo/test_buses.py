"""Which topics the demo writes to."""

from collections.abc import Sequence

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger_cli.demo.bus import (
    filled_topics,
    refuse_changes,
    refuse_topics_of_others,
    wait_until_free,
)
from gpuledger_cli.demo.run_bus import find_beginning
from tests.default_topics import EVENTS, SAMPLES, TOPICS
from tests.errors import has_words
from tests.unit.sinks.builders import ManualClock

OWN = {"gpuledger-demo-join": [SAMPLES.name], "gpuledger-demo-store": [EVENTS.name]}


async def test_a_topic_with_one_record_is_filled() -> None:
    bus = MemoryBus()
    names = [topic.name for topic in TOPICS]
    assert await filled_topics(bus, names) == []
    async with bus.producer() as producer:
        await producer.publish(EVENTS.name, 3, [Message(b"node", b"{}", 0)])
    assert await filled_topics(bus, names) == [EVENTS.name]


def mistake_of(
    groups: dict[str, list[str]], *, filled: list[str], reuse_topics: bool
) -> str | None:
    """Return why topics are refused; `None` where they are taken."""
    try:
        refuse_topics_of_others(groups, filled=filled, reuse_topics=reuse_topics)
    except TopicsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("reuse_topics", [False, True])
@pytest.mark.parametrize("groups", [{}, OWN])
def test_topics_without_records_and_readers_are_taken(
    groups: dict[str, list[str]], *, reuse_topics: bool
) -> None:
    assert mistake_of(groups, filled=[], reuse_topics=reuse_topics) is None


def test_what_an_earlier_demo_left_is_taken_only_where_the_option_says_so() -> None:
    """The line names the topic and both remedies."""
    assert mistake_of(OWN, filled=[EVENTS.name], reuse_topics=True) is None
    mistake = mistake_of(OWN, filled=[EVENTS.name], reuse_topics=False)
    assert mistake is not None
    assert mistake.startswith(f"{EVENTS.name} holds records ")
    assert "--reuse-topics" in mistake


@pytest.mark.parametrize("reuse_topics", [False, True])
@pytest.mark.parametrize("filled", [[], [EVENTS.name]])
@pytest.mark.parametrize("group", ["gpuledger-join", "billing", "gpuledger-demo"])
def test_a_topic_that_another_group_reads_is_refused_whatever_the_option_says(
    group: str, filled: list[str], *, reuse_topics: bool
) -> None:
    """The line names the topic and the group."""
    groups = {**OWN, group: [SAMPLES.name]}
    with pytest.raises(TopicsError, check=has_words(SAMPLES.name, f" {group},")):
        refuse_topics_of_others(groups, filled=filled, reuse_topics=reuse_topics)


def test_records_that_no_demo_has_read_are_somebody_else_s() -> None:
    """Agents may be there before any reader."""
    with pytest.raises(TopicsError, check=has_words(SAMPLES.name, "gpuledger-demo-join")):
        refuse_topics_of_others({}, filled=[SAMPLES.name], reuse_topics=True)


@pytest.mark.parametrize(
    ("leaves_after_seconds", "is_refused"), [(0, False), (11, False), (60, True)]
)
async def test_groups_with_members_are_waited_for_as_long_as_a_killed_run_holds_them(
    leaves_after_seconds: float, *, is_refused: bool
) -> None:
    """A run that lives keeps its partitions: nobody has joined its groups by then."""
    clock = ManualClock(0)

    async def live() -> Sequence[str]:
        return [] if clock.now_ns >= leaves_after_seconds * 1e9 else ["gpuledger-demo-join"]

    if is_refused:
        with pytest.raises(TopicsError, check=has_words("-demo-join")):
            await wait_until_free(live, clock=clock)
    else:
        await wait_until_free(live, clock=clock)
    assert clock.now_ns <= 16 * 10**9


async def test_what_somebody_writes_before_the_run_has_begun_is_refused() -> None:
    bus = MemoryBus()
    beginning = await find_beginning(bus)
    refuse_changes(beginning, await find_beginning(bus), samples=SAMPLES)
    async with bus.producer() as producer:
        await producer.publish(SAMPLES.name, 1, [Message(b"node", b"{}", 0)])
    with pytest.raises(BusUnavailableError, check=has_words(SAMPLES.name)):
        refuse_changes(beginning, await find_beginning(bus), samples=SAMPLES)
