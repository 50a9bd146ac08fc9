"""The store under kills at random moments, rebalances, and a writer that was suspended and wakes.

Half of the ticks are on the topic twice, as if the join ran at least once. The table is compared
with the topic: 0 lost, 0 doubled. `STORE_KILLS=50` sets the number of kills.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING

import duckdb
import pytest
from deltalake import DeltaTable

from tests.real.sinks.running_sinks import NODES, make_topics, publish, ticks
from tests.unit.sinks.builders import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.sinks.running_sinks import Sink

KILLS = int(os.environ.get("STORE_KILLS", "4"))
TICKS_A_KILL = 12


def sums(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each node's number of ticks and busy time in the table."""
    if not DeltaTable.is_deltatable(str(folder / "usage")):
        return {}
    if not (files := DeltaTable(str(folder / "usage")).file_uris()):
        return {}
    sql = (
        "SELECT node, sum(sample_count)::BIGINT, sum(busy_ns)::BIGINT"  # noqa: S608  # our own files
        f" FROM read_parquet({files}) GROUP BY 1"
    )
    with duckdb.connect() as connection:
        return {row[0]: row[1:] for row in connection.execute(sql).fetchall()}


@pytest.mark.extended
async def test_two_sinks_killed_and_stopped_at_random_moments_count_each_tick_once(
    broker: Kafka, tmp_path: Path, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    folder = tmp_path / "store"
    chance = random.Random(KILLS)  # noqa: S311  # moments, not secrets
    settings = {
        "store__uri": str(folder),
        "store__flush_seconds": "0.05",
        "store__max_poll_records": "7",
    }
    sinks = [start_sink("store", broker, **settings) for _ in range(2)]
    for number in range(KILLS):
        made = ticks(TICKS_A_KILL, first=number * TICKS_A_KILL)
        again = chance.sample(made, len(made) // 2)
        await publish(broker, [*made, *sorted(again, key=lambda each: each.seq)])
        victim = chance.choice(sinks)
        await asyncio.sleep(chance.uniform(0.0, 2.0))
        if number % 4 == 3:
            # Longer than its session lasts: the other one has its partitions when it wakes.
            victim.send(signal.SIGSTOP)
            await asyncio.sleep(8)
            victim.send(signal.SIGCONT)
        else:
            victim.kill()
            victim.start()
    every = TICKS_A_KILL * KILLS
    expected = dict.fromkeys(NODES, (every, every * SECOND_NS // 2))
    sinks[0].wait_until(
        lambda: sum(count for count, _ in sums(folder).values()) >= every * len(NODES),
        deadline_seconds=120,
    )
    # Anything written twice would arrive now.
    await publish(broker, ticks(1, first=every))
    expected = {
        node: (count + 1, busy + SECOND_NS // 2) for node, (count, busy) in expected.items()
    }
    sinks[0].wait_until(
        lambda: sum(count for count, _ in sums(folder).values()) >= (every + 1) * len(NODES),
        deadline_seconds=120,
    )
    assert sums(folder) == expected
    for sink in sinks:
        assert sink.stop(deadline_seconds=120) == 0
    assert sums(folder) == expected
