"""The spool keeps order and its size limit; read bundles stay until they are acknowledged."""

import os
from pathlib import Path

from gpuledger.bus.protocol import Message
from gpuledger_agent.metrics import (
    QUEUE_TICKS,
    SPOOL_BYTES,
    SPOOL_DROPPED,
    SPOOL_TICKS,
    SPOOL_WRITTEN,
    TICKS_DROPPED,
)
from gpuledger_agent.publish.message_bundle import BundledMessage
from tests.default_topics import INCIDENTS, SAMPLES
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    NOW_SECONDS,
    bundle_of,
    database_in,
    drain,
    dropped,
    fill,
    number_of,
    reopened,
    spool_in,
)


def test_all_bundles_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(100))
    assert drain(spool) == list(range(100))
    assert spool.is_empty


def test_a_read_returns_at_most_max_bundles_or_one_frame(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.append([bundle_of(number) for number in range(5)])
    spool.append([bundle_of(number) for number in range(5, 9)])
    found = spool.read(max_bundles=3)
    assert found
    assert [number_of(bundle) for bundle in found[0]] == [0, 1, 2, 3, 4]
    found = spool.read(max_bundles=9)
    assert found
    assert len(found[0]) == 9


def test_large_ticks_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(9), size_bytes=400_000)
    found = spool.read(max_bundles=60)
    assert found
    assert [number_of(bundle) for bundle in found[0]] == [0, 1]
    assert drain(spool) == list(range(9))


def test_bundles_that_were_read_but_not_acknowledged_are_read_again(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1, 2, 3)
    assert spool.read(max_bundles=2) == spool.read(max_bundles=2)


def test_the_next_process_continues_where_the_last_one_was_killed(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(10))
    found = spool.read(max_bundles=4)
    assert found
    spool.ack(found[1])
    again = reopened(spool, tmp_path)
    fill(again, 10)
    assert drain(again) == [4, 5, 6, 7, 8, 9, 10]


def test_a_full_spool_drops_its_oldest_bundles_and_counts_them(tmp_path: Path) -> None:
    before = dropped("bytes")
    spool = spool_in(tmp_path, max_bytes=16_000)
    for number in range(200):
        spool.append([bundle_of(number, size_bytes=64)])
        assert value_of(SPOOL_BYTES) <= 16_000
    assert value_of(SPOOL_BYTES) > 15_500
    kept = drain(spool)
    assert kept == list(range(200 - len(kept), 200))
    assert dropped("bytes") - before == 200 - len(kept)


def test_the_files_exceed_the_limit_by_a_few_megabytes_and_shrink_once_all_is_sent(
    tmp_path: Path,
) -> None:
    max_bytes = 8 * 2**20
    spool = spool_in(tmp_path, max_bytes=max_bytes)
    for number in range(400):
        noise = Message(key=b"", value=os.urandom(50_000), timestamp_ms=number)
        spool.append([(BundledMessage(SAMPLES.name, noise),)])
    assert spool.size_bytes > 0.99 * max_bytes
    assert folder_bytes(tmp_path) < max_bytes + 6 * 2**20
    while found := spool.read(max_bundles=60):
        spool.ack(found[1])
    assert folder_bytes(tmp_path) < 2**17


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in database_in(folder).parent.iterdir())


def test_bundles_in_flight_are_not_counted_as_dropped(tmp_path: Path) -> None:
    before = dropped("bytes")
    spool = spool_in(tmp_path, max_bytes=2_000)
    fill(spool, 1)
    found = spool.read(max_bundles=1)
    assert found
    spool.set_in_flight(found[1])
    fill(spool, *range(2, 30))
    spool.ack(found[1])
    kept = drain(spool)
    assert dropped("bytes") - before == 28 - len(kept)


def test_metrics_that_count_incidents_and_inventories_too_mention_it_in_their_help(
    tmp_path: Path,
) -> None:
    incident = Message(key=b"default/node-1", value=b"xid", timestamp_ms=1000 * NOW_SECONDS)
    spool, before = spool_in(tmp_path), written()
    spool.append([bundle_of(1), (BundledMessage(INCIDENTS.name, incident),), bundle_of(2)])
    assert written() - before == 3
    for metric in (SPOOL_WRITTEN, SPOOL_TICKS, SPOOL_DROPPED, QUEUE_TICKS, TICKS_DROPPED):
        (family,) = metric.collect()
        assert "samples and other messages " in family.documentation, family.name


def written() -> float:
    (family,) = SPOOL_WRITTEN.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_total"))
