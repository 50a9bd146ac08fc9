"""The agent's spool with processes and a real broker: outages, kills, restarts."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import yaml

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from tests.real.test_agent import (
    PUBLISHED,
    QUICKSTART,
    agent_of,
    assert_readings_are_in_order_and_whole,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import Kafka

TICK_SECONDS = 0.25
AFTER_SECONDS = 0.5
READ_SECONDS = 0.1
MISSED_TICKS = 80
"""More than one batch of 60."""


def spooling_agent_of(
    kafka: Kafka, folder: Path, *, scenario: Path = QUICKSTART, **settings: str
) -> Component:
    """Return an agent with a spool; after each restart it continues with the same played node."""
    (folder / "spool").mkdir()
    return agent_of(
        kafka,
        folder,
        scenario=scenario,
        SAMPLING_INTERVAL_SECONDS=str(TICK_SECONDS),
        SIMULATOR__EPOCH_NS=str(time.time_ns()),
        SPOOL__DIRECTORY=str(folder / "spool"),
        SPOOL__SPILL_AFTER_SECONDS=str(AFTER_SECONDS),
        SPOOL__MIN_FREE_BYTES="0",
        **settings,
    )


async def wait_until_empty(agent: Component) -> None:
    async with asyncio.timeout(120):
        while agent.metric("gpuledger_agent_spool_samples") > 0:  # noqa: ASYNC110  # a process
            await asyncio.sleep(READ_SECONDS)


async def wait_until_spooled(agent: Component, ticks: int) -> None:
    async with asyncio.timeout(120):
        while agent.metric("gpuledger_agent_spool_samples") < ticks:  # noqa: ASYNC110  # a process
            await asyncio.sleep(READ_SECONDS)


async def test_an_outage_with_a_kill_and_a_restart_ends_with_the_whole_time_in_order(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    await create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    agent = spooling_agent_of(kafka, tmp_path)
    agent.start()
    agent.wait_until_ready()
    await asyncio.sleep(1)
    await wait_until_empty(agent)
    kafka.kill()
    await wait_until_spooled(agent, 6)
    agent.kill()
    agent.start()
    agent.wait_until_ready()
    await wait_until_spooled(agent, 16)
    assert agent.stop() == 0, agent.log_tail()
    assert "stopped_with_unpublished_ticks" not in agent.log_tail()
    agent.start()
    agent.wait_until_ready()
    await asyncio.sleep(2)
    kafka.start()
    agent.wait_until_ready()
    await wait_until_empty(agent)
    await asyncio.sleep(1)
    assert agent.stop() == 0, agent.log_tail()

    read = await read_all(kafka)
    # Ticks acknowledged but not yet noted when the process was killed come twice.
    once = list({sample.seq: sample for sample in read.samples}.values())
    assert len({sample.boot_id for sample in once}) == 1
    assert [sample.seq for sample in once] == sorted(sample.seq for sample in once)
    readings = list(dict.fromkeys(one.seq for one in read.readings))
    assert_readings_are_in_order_and_whole(readings, [one.seq for one in once])
    assert (once[-1].time_ns - once[0].time_ns) / 1e9 > 8
    gaps = [
        (after.time_ns - before.time_ns - after.interval_ns) / 1e9
        for before, after in pairwise(once)
    ]
    # Only while the agent did not run: after the kill and during the restart.
    missing = [gap for gap in gaps if abs(gap) > 2 * TICK_SECONDS]
    assert len(missing) <= 2


async def test_a_spool_is_sent_faster_than_real_time_and_no_faster_than_allowed(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    await create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    agent = spooling_agent_of(kafka, tmp_path, SPOOL__CATCH_UP_FACTOR="8")
    agent.start()
    agent.wait_until_ready()
    kafka.kill()
    await wait_until_spooled(agent, MISSED_TICKS)
    published = agent.metric(PUBLISHED)
    kafka.start()
    async with asyncio.timeout(120):
        while agent.metric(PUBLISHED) == published:  # noqa: ASYNC110  # as above
            await asyncio.sleep(READ_SECONDS)
    # If this process was slow to check, most of the backlog is already sent.
    began_seconds = time.monotonic()
    waiting = agent.metric("gpuledger_agent_spool_samples")
    await wait_until_empty(agent)
    took_seconds = time.monotonic() - began_seconds
    assert agent.stop() == 0, agent.log_tail()
    # The last batch is followed by no pause; the first ones were sent before the count. It ends,
    # although ticks keep coming, so it is faster than real time.
    assert took_seconds >= (waiting - 60) * TICK_SECONDS / 8, waiting
    read = await read_all(kafka)
    assert_readings_are_in_order_and_whole(
        [one.seq for one in read.readings], [one.seq for one in read.samples]
    )
    for before, after in pairwise(read.samples):
        assert after.time_ns - before.time_ns == pytest.approx(after.interval_ns, abs=100_000_000)


HOUR = 3600
DAY = 24 * HOUR
# When the played node's wall clock is set, and by how much: an hour ahead for two seconds, three
# days back for two, and two days ahead for one, which is more than a broker accepts. In the
# end, it is right.
CLOCK_STEPS = [(6, HOUR), (8, -HOUR), (9, -3 * DAY), (11, 3 * DAY), (12, 2 * DAY), (13, -2 * DAY)]


@pytest.mark.extended
async def test_a_wall_clock_that_is_set_during_an_outage_loses_no_tick_and_no_time_is_wrong(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    await create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    kafka.kill()
    played = yaml.safe_load(QUICKSTART.read_bytes())
    for node in played["nodes"]:
        node["clock_steps"] = [{"at_seconds": at, "by_seconds": by} for at, by in CLOCK_STEPS]
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump(played))
    agent = spooling_agent_of(kafka, tmp_path, scenario=scenario)
    began_ns = time.time_ns()
    agent.start()
    await asyncio.sleep(CLOCK_STEPS[-1][0] + 3)
    await wait_until_spooled(agent, round(8 / TICK_SECONDS) + 1)
    spooled = agent.metric("gpuledger_agent_spool_samples")
    kafka.start()
    agent.wait_until_ready()
    await wait_until_empty(agent)
    await asyncio.sleep(1)
    counted = agent.metric('gpuledger_agent_messages_rejected_total{reason="future"}')
    metrics = agent.metrics()
    assert agent.stop() == 0, agent.log_tail()

    read = await read_all(kafka)
    seqs = list(dict.fromkeys(sample.seq for sample in read.samples))
    assert seqs == sorted(seqs)
    assert spooled > 8 / TICK_SECONDS
    assert counted == 0
    assert 'gpuledger_agent_spool_samples_dropped_total{reason="age"} 0.0' in metrics
    ahead = {round((sample.time_ns - began_ns) / 1e9 / HOUR) for sample in read.samples}
    assert ahead == {0}
    # Only a tick that could not be made in time is missing.
    missing = (seqs[-1] - seqs[0]) / 1000 - (len(seqs) - 1) * TICK_SECONDS
    assert missing < 4 * TICK_SECONDS
