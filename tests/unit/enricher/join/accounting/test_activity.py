"""Activity: what the chip's counters say of the device, apportioned by busy seconds."""

import pytest

from enricher.join.accounting.books import book_tick
from enricher.join.checks import InvalidTickError, book_valid_tick
from gpuledger.codec import Decoder, encode
from gpuledger.records import Account, Entry, GpuProfiling, NodeSample
from gpuledger.records.readings import PARTS
from gpuledger.topics import SAMPLES
from gpuledger.twins import twin_of
from tests.unit.enricher.join.ticks import process, reading, sample

COUNTERS = GpuProfiling(sm_active_ratio=0.4, tensor_active_ratio=0.2, dram_active_ratio=None)
TWO = [
    process(container=0, sm_utilization_ratio=0.6),
    process(container=1, pid=2, sm_utilization_ratio=0.2),
]


def active(entries: list[Entry]) -> dict[str, tuple[float | None, ...]]:
    return {
        one.container_id[0] if one.container_id else str(one.account): (
            one.sm_active_seconds,
            one.tensor_active_seconds,
            one.dram_active_seconds,
        )
        for one in entries
    }


def as_read(tick: NodeSample) -> NodeSample:
    """Give the tick as the join reads it: its counters are bytes still."""
    decoder = Decoder(topic=SAMPLES.name, record=twin_of(NodeSample, unread=PARTS))
    return decoder.decode(encode(tick))


@pytest.mark.parametrize("is_read", [False, True])
def test_active_seconds_go_by_busy_seconds_and_idle_has_none(is_read: bool) -> None:  # noqa: FBT001 - a case of the table
    tick = sample(gpus=[reading(utilization_ratio=0.8, profiling=COUNTERS)], processes=TWO)
    (row,) = book_tick(as_read(tick) if is_read else tick)
    found = active(row.entries)
    assert found["0"] == pytest.approx((0.3, 0.15, None))
    assert found["1"] == pytest.approx((0.1, 0.05, None))
    assert found["idle"] == (None, None, None)


def test_without_counters_there_is_no_activity() -> None:
    (row,) = book_tick(sample(processes=TWO))
    assert set(active(row.entries).values()) == {(None, None, None)}


@pytest.mark.parametrize("busy", [0.0, None])
def test_activity_where_nobody_was_seen_to_be_busy_is_nobodys(busy: float | None) -> None:
    device = reading(utilization_ratio=busy, profiling=COUNTERS, memory_used_bytes=0)
    (row,) = book_tick(sample(gpus=[device], processes=[process(container=0)]))
    found = active(row.entries)
    assert found["unattributed"] == (0.4, 0.2, None)
    assert found["0"] == (0.0, 0.0, None)


def test_counters_at_rest_make_no_entry() -> None:
    rest = GpuProfiling(sm_active_ratio=0.0)
    device = reading(utilization_ratio=0.0, profiling=rest, memory_used_bytes=0)
    (row,) = book_tick(sample(gpus=[device]))
    assert [one.account for one in row.entries] == [Account.HOST, Account.IDLE]


def test_a_cut_gpus_activity_is_its_instances() -> None:
    part = reading(
        uuid="MIG-1",
        parent_uuid="GPU-a",
        gpu_instance=1,
        memory_total_bytes=2**30,
        profiling=COUNTERS,
    )
    tick = sample(
        gpus=[reading(mig_enabled=True, profiling=COUNTERS), part],
        processes=[process(gpu=1, container=0)],
    )
    whole, its_own = book_tick(tick)
    assert set(active(whole.entries).values()) == {(None, None, None)}
    assert active(its_own.entries)["0"] == pytest.approx((0.4, 0.2, None))


def test_counters_that_are_none_make_the_tick_invalid() -> None:
    text = encode(sample(gpus=[reading(profiling=COUNTERS)])).replace(b"0.4", b'"many"')
    decoder = Decoder(topic=SAMPLES.name, record=twin_of(NodeSample, unread=PARTS))
    with pytest.raises(InvalidTickError, match=r"field profiling: .*sm_active_ratio"):
        book_valid_tick(decoder.decode(text))
