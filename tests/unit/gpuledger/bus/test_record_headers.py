"""Headers are counted without reading them, as many as the library would read."""

from __future__ import annotations

from aiokafka.record.memory_records import MemoryRecords
from hypothesis import example
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.bus.aiokafka_patches.unpacking import max_headers
from tests import raw_batches
from tests.raw_batches import Raw

headers = st.lists(st.tuples(st.just(b"n"), st.binary(max_size=3)), max_size=200)
records = st.lists(
    st.builds(
        Raw, st.none() | st.binary(max_size=200), st.none() | st.binary(max_size=200), headers
    ),
    max_size=8,
)


@for_any(written=records)
def test_the_largest_number_of_headers_of_a_record_is_returned(written: list[Raw]) -> None:
    expected = max((len(record.headers) for record in written), default=0)

    assert max_headers(raw_batches.body(written), max_records=8) == expected


def test_no_more_records_are_scanned_than_the_library_would_read() -> None:
    written = raw_batches.body([Raw(b"k", b"v")] * 3) + raw_batches.empty_headers(9)

    assert max_headers(written, max_records=3) == 0
    assert max_headers(written, max_records=4) == 9


@example(data=raw_batches.encoded(11) + b"\x80\0\x80\0\x80\0\1\1\2\0\0", padded=0)
@for_any(data=st.binary(max_size=60), padded=st.integers(0, 12))
def test_every_header_that_the_library_reads_from_damaged_records_is_counted(
    data: bytes, padded: int
) -> None:
    """Padded numbers, wrong lengths: the library never finds more headers than were counted."""
    written = b"\x80" * padded + data
    count = 1 + len(written)
    batch = MemoryRecords(raw_batches.batch(written, count=count, time_ms=0)).next_batch()
    found = 0
    try:
        for record in batch:
            found = max(found, len(record.headers))
    except Exception:  # noqa: BLE001, S110  # whatever it raises, it reads no further
        pass

    assert found <= max_headers(written, max_records=count)


def test_truncated_records_are_counted_up_to_the_end() -> None:
    whole = raw_batches.empty_headers(5) + raw_batches.empty_headers(9)

    assert max_headers(whole[:-1], max_records=2) == 9
    assert max_headers(whole[:20], max_records=2) == 5
    assert max_headers(b"", max_records=2) == 0
