"""Batches that other clients may write to a topic, with arbitrary bytes."""

from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking
from gpuledger.bus.protocol import Record
from tests import raw_batches
from tests.fuzz.mutations import changed_bytes
from tests.raw_batches import NONE, ZSTD, Raw
from tests.unit.gpuledger.bus.test_kafka_unpacking import answer

COUNT = 3
MIDDLE = range(COUNT, 2 * COUNT)
END = 3 * COUNT
RECORDS = [Raw(b"k", b"1"), Raw(None, b"2", [(b"name", b"content")]), Raw(b"k", None)]
BODY = raw_batches.body(RECORDS)
DELTAS = st.integers(-2, 5) | st.integers(-(2**63), 2**63 - 1)


def batch(packed: bytes, *, at: int, codec: int) -> bytes:
    return raw_batches.batch(packed, count=COUNT, codec=codec, time_ms=5, base_offset=at)


def bodies() -> st.SearchStrategy[bytes]:
    deltas = st.lists(DELTAS, min_size=COUNT, max_size=COUNT)
    return changed_bytes([BODY]) | deltas.map(
        lambda claimed: raw_batches.body(RECORDS, deltas=claimed)
    )


def packed() -> st.SearchStrategy[tuple[bytes, int]]:
    """Return the content of a batch, and its codec: changed before compression or after it."""
    before = st.tuples(bodies(), st.sampled_from([NONE, ZSTD])).map(
        lambda given: (raw_batches.pack(*given), given[1])
    )
    after = changed_bytes([raw_batches.pack(BODY, ZSTD), raw_batches.two_frames(BODY)])
    return before | st.tuples(after, st.just(ZSTD))


@example(between=(raw_batches.body(RECORDS, deltas=(0, 1, 10**6)), NONE))
@example(between=(raw_batches.body(RECORDS, deltas=(0, 2, 2)), NONE))
@given(between=packed())
def test_a_bad_batch_is_read_or_reported_as_a_gap_and_its_neighbours_are_read(
    between: tuple[bytes, int],
) -> None:
    install_unpacking()
    good = raw_batches.pack(BODY, ZSTD)
    data = [batch(good, at=0, codec=ZSTD), batch(good, at=2 * COUNT, codec=ZSTD)]
    found = answer(batch(between[0], at=MIDDLE.start, codec=between[1]).join(data))
    records: list[Record] = []
    for record in found:
        assert found.next_fetch_offset == record.offset + 1
        records.append(record)

    assert found.next_fetch_offset == END
    assert [each.offset for each in records[:COUNT]] == [0, 1, 2]
    assert [each.offset for each in records[-COUNT:]] == [6, 7, 8]
    assert [each.value for each in records[:COUNT]] == [each.value for each in RECORDS]
    assert [each.value for each in records[-COUNT:]] == [each.value for each in RECORDS]
    check_middle(records[COUNT:-COUNT])


def check_middle(records: list[Record]) -> None:
    """Each offset of the batch belongs to a record, or to the range of the last one."""
    *offsets, last = [record.offset for record in records]
    assert [*offsets, last] == sorted({*offsets, last})
    assert last == MIDDLE[-1]
    assert not any(record.unreadable for record in records[:-1])
    if records[-1].unreadable:
        assert records[-1].first_offset in range([MIDDLE.start - 1, *offsets][-1] + 1, last + 1)
    else:
        assert [*offsets, last] == list(MIDDLE)
