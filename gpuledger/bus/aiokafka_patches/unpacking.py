"""What a consumer makes of the batches that brokers give it: no batch ends or blocks whoever reads.

The rule. A batch is anybody's bytes: a broker looks at its head and its checksum, and hardly at
what is in it. So whatever goes wrong while one is unpacked is a property of that batch, and of
nothing else. What of it was read before stays read; the rest, up to and with its last offset, is
one `Record` without key and value, whose `unreadable` says which offsets it stands for and why. It
lies between the other records in its place, so that stages reject it as they reject any record, and
positions, commits and transactions move behind it like behind any other. The offsets are exact: the
head of a batch, which the broker wrote itself, has the last one, also where compaction or a
re-packing has removed records.

What is refused without being unpacked:

- **A codec that none of ours writes**: gzip, snappy and lz4 have decoders of their own, in C, for
  bytes that anybody may have made. Ours write zstd, or nothing packed.
- **More than `MAX_BATCH_RECORDS`**, by the batch's head: each would be a record to reject.
- **More than `MAX_UNPACKED_BYTES`**, by what the frame says of itself or by what comes out of it.
- **A record of more than `MAX_RECORD_HEADERS`**: two bytes make a header, which costs a hundred
  times as much to read. What zstd has unpacked is looked through before the library reads it
  (`max_headers`), where there is room for many; of the rest each record once it is read.

What a record says of its own offset is believed within its batch alone. Brokers give a batch its
offsets and look at those of its records where they pack it anew, not in one that is not packed: one
that claims an offset behind its batch would move the position past records of others, one that
claims an offset before it would vanish. So the offsets of a batch rise, and lie in the range that
its head says, and nothing follows the last; what breaks that is damage. A gap is none: compaction
leaves them.

zstd allows several frames in one batch, and frames to be skipped; all of it counts as one.

A batch whose checksum does not fit may have been spoiled on its way: it is given up once the last
`_FETCHES` fetches of it by this process, whichever consumers they were of, all brought it so: then
the broker's own copy must be.

How much of it is unpacked at once is `turns`' business.

How it gets in. aiokafka's fetcher makes a `PartitionRecords` of what a broker answered for one
partition, and drains it through a `FetchResult`; `install_unpacking` puts `PartitionBatches` and
`PartitionAnswer` in their places, for all consumers of the process, and the unpacking of zstd in
place of aiokafka's.
"""

import threading
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from typing import Any, ClassVar, Final, Never

from aiokafka.consumer import fetcher
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult, PartitionRecords
from typing_extensions import override

from gpuledger.bus.aiokafka_patches.packing import modules_of_records
from gpuledger.bus.aiokafka_patches.turns import install_turns, turn
from gpuledger.bus.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_RECORDS,
    MAX_RECORD_HEADERS,
    MAX_TURN_BYTES,
    MAX_UNPACKED_BYTES,
)
from gpuledger.bus.protocol import Record, TopicPartition, Unreadable, UnreadableReason
from gpuledger.errors import GpuledgerError

_MAX_NUMBER_BYTES: Final = 10
"""As many as the library takes."""
_MORE: Final = 0x80
_LARGEST: Final = (1 << 64) - 1


def max_headers(records: bytes, *, max_records: int) -> int:
    """Return the most headers that one of the first records claims; 0 where there are none."""
    found, position, end = 0, 0, len(records)
    try:
        while max_records and position < end:
            length, position = _number(records, position)
            found = max(found, _headers_of(records, position))
            if length < 0:
                break
            position += length
            max_records -= 1
    except (IndexError, ValueError):
        pass  # damaged here: the library comes no further either
    return found


def _headers_of(records: bytes, position: int) -> int:
    for _ in range(3):  # attributes, deltas of time and offset
        position = position + 1 if records[position] < _MORE else _number(records, position)[1]
    for _ in range(2):  # key and value, -1 where there is none
        length, position = _number(records, position)
        if length > 0:
            position += length
    return _number(records, position)[0]


def _number(records: bytes, position: int) -> tuple[int, int]:
    """Return a number, zigzag and seven bits a byte, and where what follows it begins."""
    byte = records[position]
    if byte < _MORE:
        return (byte >> 1) ^ -(byte & 1), position + 1
    value = byte & ~_MORE
    for shift in range(7, 7 * _MAX_NUMBER_BYTES, 7):
        position += 1
        byte = records[position]
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            value &= _LARGEST
            return (value >> 1) ^ -(value & 1), position + 1
    raise ValueError("a number does not end")


_CODECS: Final = {0: "none", 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_OUR_CODECS: Final = frozenset({0, 4})
_FETCHES: Final = 3
_CHUNK_BYTES: Final = 1 << 18
_DETAIL_CHARACTERS: Final = 200
UNCOUNTED_BYTES: Final = MAX_BATCH_BYTES
"""So many, which none of ours has more of, are not looked through before they are read: that costs
1 to 2 us a record, half as much again as to read it. They have room for 500,000 headers of one
record, after which the batch is refused: 50 to 100 ms and 30 MiB."""


class UnreadableError(GpuledgerError):
    """A batch is not unpacked; the message says why."""

    def __init__(self, message: str, *, reason: UnreadableReason) -> None:
        super().__init__(message)
        self.reason = reason


@cache
def install_unpacking() -> None:
    """Have every consumer of this process read batches as this module says.

    Can go once aiokafka steps over a batch that it cannot unpack (aio-libs/aiokafka#321), reports
    the offsets of that batch, and bounds what comes out of it.
    """
    install_turns()
    fetcher.PartitionRecords = PartitionBatches
    fetcher.FetchResult = PartitionAnswer
    unpacker = ZstdUnpacker()
    for module in modules_of_records():
        vars(module)["zstd_decode"] = unpacker.unpack


class ZstdUnpacker(threading.local):
    """Unpacks what zstd has packed, in as many frames as there are, and never more than is allowed.

    A context is one thread's at a time, and is kept: to make one costs more than to unpack a tick,
    and agents send batches of one tick.
    """

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415  # agents read nothing and have it not

        self._error = zstandard.ZstdError
        self._read_size = zstandard.frame_content_size
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_BYTES)

    def unpack(self, payload: bytes) -> bytes:
        """Return the bytes that were packed; raises `UnreadableError` and `ZstdError`."""
        # Ours are one frame that says its size; -1 is one that does not, 0 one to be skipped.
        size_bytes = self._read_size(payload)
        if size_bytes > MAX_UNPACKED_BYTES:
            raise _too_large(f"{size_bytes}")
        unpacked = None
        if size_bytes > 0:
            try:
                unpacked = self._context.decompress(payload, allow_extra_data=False)
            except self._error:
                pass  # more follows the frame, or it is damaged
            else:
                turn.used_bytes += size_bytes
        if unpacked is None:
            unpacked = self._unpack_frames(payload)
        if len(unpacked) > UNCOUNTED_BYTES:
            refuse_many_headers(max_headers(unpacked, max_records=MAX_BATCH_RECORDS))
        return unpacked

    def _unpack_frames(self, payload: bytes) -> bytes:
        """Return what all frames hold; of one that ends too early what there is of it."""
        chunks, left_bytes = [], MAX_UNPACKED_BYTES
        with self._context.stream_reader(payload, read_across_frames=True) as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                chunks.append(chunk)
                turn.used_bytes += len(chunk)
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    raise _too_large(f"more than {MAX_UNPACKED_BYTES}")
        return b"".join(chunks)


class PartitionBatches(PartitionRecords):  # type: ignore[misc]  # aiokafka is untyped
    """The records of one partition in one answer of a broker; iterated anew by each poll."""

    next_fetch_offset: int
    _is_counted = False
    """Whether it has been counted as fetched: all at once, as a batch does not tell its size."""
    _spoiled: ClassVar[dict[TopicPartition, tuple[int, int]]] = {}
    """For each partition the batch whose checksum did not fit last, and how often in a row.

    Of all consumers of the process, as aiokafka does not say whose answer it is."""

    @override
    def __iter__(self) -> Iterator[Record]:
        """Yield all records, for whom no event loop waits."""
        for record in self._records_iterator:
            if record is None:
                turn.used_bytes = 0
            else:
                yield record

    def in_turns(self) -> Iterator[Record | None]:
        """Yield the records; `None` between two batches where the rest is for another turn."""
        if not self._is_counted and not turn.is_used_up:
            turn.used_bytes += self._records.size_in_bytes()
            self._is_counted = True
        records: Iterator[Record | None] = self._records_iterator
        return records

    @override
    def _unpack_records(self) -> Generator[Record | None, None, None]:
        """Yield what `in_turns` does; end early where the rest is to be fetched again.

        One function, as agents send batches of one tick: a call for each costs as much as its tick.
        """
        topic, partition = self._tp
        make = tuple.__new__  # what a call of the class comes to, in half the time
        while self._records.has_next():
            while turn.used_bytes > MAX_TURN_BYTES:
                yield None
            batch = self._records.next_batch()
            next_offset = batch.next_offset
            try:
                # Almost always none is spoiled, and none was.
                if (self._spoiled or not batch.validate_crc()) and self._may_be_spoiled(batch):
                    return
                records = iter(self._wanted(batch))
                before, last_offset = batch.base_offset - 1, next_offset - 1
                for record in records:
                    offset = record.offset
                    # What follows the last is asked for before that is handed out: behind it there
                    # would be no offset left to tell.
                    if not before < offset <= last_offset or (
                        offset == last_offset and next(records, None) is not None
                    ):
                        _raise_other_offsets(batch, offset)
                    before = offset
                    if len(record.headers) > MAX_RECORD_HEADERS:
                        refuse_many_headers(len(record.headers))
                    if offset < self.next_fetch_offset:
                        continue  # read before: brokers answer with whole batches
                    self.next_fetch_offset = offset + 1
                    key, value = record.key, record.value
                    fields = (topic, partition, offset, record.timestamp, key, value, None)
                    yield make(Record, fields)
                    if offset == last_offset:
                        break  # a batch that was asked behind its end begins anew
            except Exception as error:  # noqa: BLE001  # whatever a batch makes a library raise
                yield from self._skip(batch, error)
            # Also where compaction has removed the last records of the batch.
            self.next_fetch_offset = max(self.next_fetch_offset, next_offset)

    def _may_be_spoiled(self, batch: Any) -> bool:  # noqa: ANN401  # untyped
        """Return whether to fetch a batch again; `UnreadableError` where that was done before."""
        offset, partition = batch.next_offset, TopicPartition(*self._tp)
        if batch.validate_crc():
            if self._spoiled.get(partition, (None, 0))[0] == offset:
                del self._spoiled[partition]
            return False
        last_offset, times = self._spoiled.get(partition, (offset, 0))
        times = times + 1 if last_offset == offset else 1
        self._spoiled[partition] = (offset, times)
        # Spoiled on its way, perhaps: the next fetch brings it whole.
        if times < _FETCHES:
            return True
        raise UnreadableError("its checksum does not fit", reason=UnreadableReason.DAMAGED)

    def _wanted(self, batch: Any) -> Iterable[Any]:  # noqa: ANN401  # untyped
        """Return the records of a batch: none where it is a marker, or of an aborted transaction.

        Raises `UnreadableError` where the batch is in a form that none of ours writes.
        """
        if batch.is_control_batch or self._aborted_transactions or self._aborted_producers:
            if self._isolation_level == READ_COMMITTED and batch.producer_id is not None:
                self._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and self._contains_abort_marker(batch):
                    # It may stand in a partition to which its transaction wrote nothing.
                    self._aborted_producers.discard(batch.producer_id)
                if batch.is_transactional and batch.producer_id in self._aborted_producers:
                    return ()
            # Markers of transactions, which are no records, in either isolation level.
            if batch.is_control_batch:
                return ()
        codec = getattr(batch, "compression_type", None)
        if codec not in _OUR_CODECS:
            detail = "it is in the form before Kafka 0.11"  # whose class knows no codec
            if codec is not None:
                name = _CODECS.get(codec, f"codec {codec}")
                detail = f"it is packed with {name}; here it is zstd, or nothing"
            raise UnreadableError(detail, reason=UnreadableReason.CODEC)
        count = batch.last_offset_delta + 1  # as written: compaction leaves it as it was
        if count > MAX_BATCH_RECORDS:
            raise UnreadableError(
                f"its {count} records are more than the {MAX_BATCH_RECORDS} that a batch may have",
                reason=UnreadableReason.TOO_MANY,
            )
        records: Iterable[Any] = batch
        return records

    def _skip(self, batch: Any, error: Exception) -> Iterator[Record]:  # noqa: ANN401  # untyped
        """Yield one record in place of those that cannot be had."""
        topic, partition = self._tp
        first_offset = max(self.next_fetch_offset, getattr(batch, "base_offset", 0))
        next_offset = batch.next_offset
        if first_offset >= next_offset:
            return  # all of them were had before
        self.next_fetch_offset = next_offset
        reason, detail = UnreadableReason.DAMAGED, f"{type(error).__name__}: {error}"
        if isinstance(error, UnreadableError):
            reason, detail = error.reason, str(error)
        yield Record(
            topic,
            partition,
            next_offset - 1,
            max(0, getattr(batch, "max_timestamp", 0)),
            None,
            None,
            Unreadable(first_offset, reason, detail[:_DETAIL_CHARACTERS]),
        )


class PartitionAnswer(FetchResult):  # type: ignore[misc]  # aiokafka is untyped
    """One partition's part of a broker's answer: what of it was not polled yet."""

    _partition_records: PartitionBatches | None

    @override
    def getall(self, max_records: int | None = None) -> list[Record]:
        """Return the next records; keep the rest where there are as many, or the turn is over."""
        turn.begin()
        records: list[Record] = []
        if not self.check_assignment(self._topic_partition) or self._partition_records is None:
            return records
        for record in self._partition_records.in_turns():
            if record is None:
                break
            records.append(record)
            if len(records) == max_records:
                break
        else:
            self._update_position()
            self._partition_records = None
            return records
        self._update_position()
        return records


def refuse_many_headers(count: int) -> None:
    """Raise `UnreadableError` where a record has more headers than one may have."""
    if count > MAX_RECORD_HEADERS:
        raise UnreadableError(
            f"a record has {count} headers, of {MAX_RECORD_HEADERS} allowed",
            reason=UnreadableReason.TOO_MANY,
        )


def _too_large(size: str) -> UnreadableError:
    return UnreadableError(
        f"its {size} bytes, unpacked, are more than the {MAX_UNPACKED_BYTES} that a batch may have",
        reason=UnreadableReason.TOO_LARGE,
    )


def _raise_other_offsets(batch: Any, offset: int) -> Never:  # noqa: ANN401  # untyped
    raise UnreadableError(
        f"its records' offsets do not rise from {batch.base_offset} to {batch.next_offset - 1}:"
        f" one claims {offset}",
        reason=UnreadableReason.DAMAGED,
    )
