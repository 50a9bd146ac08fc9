"""Unpacks fetched batches so that a bad batch can neither stop nor block a consumer.

The rule. Any client can write any bytes into a batch: a broker checks its header and checksum, but
hardly its content. Therefore an error during unpacking only concerns that batch. Records that were
read before the error are kept. The rest of the batch, up to and including its last offset, becomes
one `Record` without key and value, whose `unreadable` gives the offsets and the cause. It is
returned at its place between the other records. Components reject it like any other invalid record,
and positions, commits and transactions move past it as usual. The offsets are exact, because the
broker itself wrote the last offset into the batch header. The last offset stays correct if
compaction or recompression removes records.

Batches are rejected, as early as possible, for:

- **A codec that gpuledger does not use**: gzip, snappy and lz4 have separate decoders, written in
  C, which would process untrusted bytes. gpuledger writes zstd or uncompressed batches.
- **More than `MAX_BATCH_RECORDS`** according to the header, because each record would have to be
  rejected separately.
- **More than `MAX_UNPACKED_BYTES`** according to the zstd frame, or in its output.
- **A record with more than `MAX_RECORD_HEADERS`**: a header takes only two bytes in the batch, but
  much more time and memory when it is read. Large decompressed batches are scanned before the
  library reads them (`max_headers`); in smaller batches each record is checked after it was read.

A record's own offset is trusted only within its batch. Brokers assign a batch's offsets, and check
the offsets of its records only if they recompress it. A record with an offset after its batch's
range would move the position past other records. A record with an offset before this range would
vanish. So the offsets in a batch must rise and lie within the header's range, and no record may
follow the last offset. All other batches count as damaged. Missing offsets are allowed, because
compaction leaves holes.

zstd allows several frames in one batch, and skippable frames. The limit is for all frames together.

A batch with a wrong checksum may have been corrupted in transit, so it is fetched again. After
`_FETCHES` consecutive fetches by consumers of this process returned it corrupted, it is rejected,
because then the broker's own copy must be corrupted.

`turns` limits how much is unpacked at once.

Installation. aiokafka's fetcher creates a `PartitionRecords` from a broker's response for one
partition, and drains it through a `FetchResult`. `install_unpacking` replaces these classes with
`PartitionBatches` and `PartitionAnswer` for all consumers of the process, and also replaces
aiokafka's zstd decompression.
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
"""Maximum length of a varint that aiokafka accepts."""
_MORE: Final = 0x80
_LARGEST: Final = (1 << 64) - 1


def max_headers(records: bytes, *, max_records: int) -> int:
    """Return the largest header count of the first `max_records` records.

    Reads only the counts in the data, not the headers themselves. Returns 0 if there is no record.
    """
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
        pass  # the data is damaged here, so aiokafka cannot read any further either
    return found


def _headers_of(records: bytes, position: int) -> int:
    for _ in range(3):  # attributes, deltas of time and offset
        position = position + 1 if records[position] < _MORE else _number(records, position)[1]
    for _ in range(2):  # key and value; the length is -1 if there is none
        length, position = _number(records, position)
        if length > 0:
            position += length
    return _number(records, position)[0]


def _number(records: bytes, position: int) -> tuple[int, int]:
    """Return a zigzag varint (seven bits per byte) and the position after it."""
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
"""Batches up to this size are not scanned for headers before they are read; gpuledger's own batches
never exceed it. A scan takes 1 to 2 us per record, half as long as reading the record. At worst, a
record in such a batch has 500,000 headers, which take 50 to 100 ms and 30 MiB before the batch is
rejected."""


class UnreadableError(GpuledgerError):
    """A batch cannot be unpacked; the message gives the cause."""

    def __init__(self, message: str, *, reason: UnreadableReason) -> None:
        super().__init__(message)
        self.reason = reason


@cache
def install_unpacking() -> None:
    """Make all consumers of this process read batches with the classes in this module.

    Remove once aiokafka skips a batch that it cannot unpack (aio-libs/aiokafka#321), reports that
    batch's offsets, and limits its unpacked size.
    """
    install_turns()
    fetcher.PartitionRecords = PartitionBatches
    fetcher.FetchResult = PartitionAnswer
    unpacker = ZstdUnpacker()
    for module in modules_of_records():
        vars(module)["zstd_decode"] = unpacker.unpack


class ZstdUnpacker(threading.local):
    """Decompresses zstd data of one or more frames, up to `MAX_UNPACKED_BYTES`.

    Each thread keeps its context, because creating one costs more than unpacking a tick, and agents
    send batches of one tick.
    """

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415  # agents never consume and do not install it

        self._error = zstandard.ZstdError
        self._read_size = zstandard.frame_content_size
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_BYTES)

    def unpack(self, payload: bytes) -> bytes:
        """Return the decompressed bytes; raise `UnreadableError` or `ZstdError`."""
        # gpuledger writes one frame with its size; -1 is an unknown size, 0 a skippable frame.
        size_bytes = self._read_size(payload)
        if size_bytes > MAX_UNPACKED_BYTES:
            raise _too_large(f"{size_bytes}")
        unpacked = None
        if size_bytes > 0:
            try:
                unpacked = self._context.decompress(payload, allow_extra_data=False)
            except self._error:
                pass  # there is more data after the frame, or it is damaged
            else:
                turn.used_bytes += size_bytes
        if unpacked is None:
            unpacked = self._unpack_frames(payload)
        if len(unpacked) > UNCOUNTED_BYTES:
            refuse_many_headers(max_headers(unpacked, max_records=MAX_BATCH_RECORDS))
        return unpacked

    def _unpack_frames(self, payload: bytes) -> bytes:
        """Return the content of all frames; a truncated frame yields its available bytes."""
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
    """One partition's records in a broker's response; each poll continues after the last one."""

    next_fetch_offset: int
    _is_counted = False
    """Whether the size of all batches was added to the turn's bytes. The size is added in one step,
    because aiokafka does not give the size of a single batch."""
    _spoiled: ClassVar[dict[TopicPartition, tuple[int, int]]] = {}
    """Each partition's last batch with a wrong checksum: its next offset, and how often it was
    fetched in a row.

    Shared by all consumers of the process, because aiokafka does not show which consumer received a
    response."""

    @override
    def __iter__(self) -> Iterator[Record]:
        """Yield all records without a limit per turn, for callers outside of an event loop."""
        for record in self._records_iterator:
            if record is None:
                turn.used_bytes = 0
            else:
                yield record

    def in_turns(self) -> Iterator[Record | None]:
        """Yield the records, or `None` between two batches if the turn is used up."""
        if not self._is_counted and not turn.is_used_up:
            turn.used_bytes += self._records.size_in_bytes()
            self._is_counted = True
        records: Iterator[Record | None] = self._records_iterator
        return records

    @override
    def _unpack_records(self) -> Generator[Record | None, None, None]:
        """Yield the items of `in_turns`; end early if the rest must be fetched again.

        This is one long function, because agents send batches of one tick, and a function call per
        batch would cost as much as reading the tick.
        """
        topic, partition = self._tp
        make = tuple.__new__  # does the same as calling the class, in half the time
        while self._records.has_next():
            while turn.used_bytes > MAX_TURN_BYTES:
                yield None
            batch = self._records.next_batch()
            next_offset = batch.next_offset
            try:
                # Fast path: this batch has a valid checksum, and no corrupted batch is remembered.
                if (self._spoiled or not batch.validate_crc()) and self._may_be_spoiled(batch):
                    return
                records = iter(self._wanted(batch))
                before, last_offset = batch.base_offset - 1, next_offset - 1
                for record in records:
                    offset = record.offset
                    # Check for records after the last offset before the record with that offset is
                    # returned. Afterwards, no offset would be left to report such records.
                    if not before < offset <= last_offset or (
                        offset == last_offset and next(records, None) is not None
                    ):
                        _raise_other_offsets(batch, offset)
                    before = offset
                    if len(record.headers) > MAX_RECORD_HEADERS:
                        refuse_many_headers(len(record.headers))
                    if offset < self.next_fetch_offset:
                        continue  # already read: brokers always return whole batches
                    self.next_fetch_offset = offset + 1
                    key, value = record.key, record.value
                    fields = (topic, partition, offset, record.timestamp, key, value, None)
                    yield make(Record, fields)
                    if offset == last_offset:
                        break  # a batch's iterator starts again if it is advanced past its end
            except Exception as error:  # noqa: BLE001  # bad bytes can make a library raise anything
                yield from self._skip(batch, error)
            # Needed if compaction has removed the last records of the batch.
            self.next_fetch_offset = max(self.next_fetch_offset, next_offset)

    def _may_be_spoiled(self, batch: Any) -> bool:  # noqa: ANN401  # untyped
        """Return whether the batch is corrupted and should be fetched again.

        Raises `UnreadableError` if it was already fetched `_FETCHES` times.
        """
        offset, partition = batch.next_offset, TopicPartition(*self._tp)
        if batch.validate_crc():
            if self._spoiled.get(partition, (None, 0))[0] == offset:
                del self._spoiled[partition]
            return False
        last_offset, times = self._spoiled.get(partition, (offset, 0))
        times = times + 1 if last_offset == offset else 1
        self._spoiled[partition] = (offset, times)
        # The batch may have been corrupted in transit; the next fetch may then return it intact.
        if times < _FETCHES:
            return True
        raise UnreadableError("its checksum is wrong", reason=UnreadableReason.DAMAGED)

    def _wanted(self, batch: Any) -> Iterable[Any]:  # noqa: ANN401  # untyped
        """Return a batch's records; none for markers and batches of aborted transactions.

        Raises `UnreadableError` if gpuledger does not accept the batch's format or size.
        """
        if batch.is_control_batch or self._aborted_transactions or self._aborted_producers:
            if self._isolation_level == READ_COMMITTED and batch.producer_id is not None:
                self._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and self._contains_abort_marker(batch):
                    # `discard`, because the transaction may have written nothing to this partition.
                    self._aborted_producers.discard(batch.producer_id)
                if batch.is_transactional and batch.producer_id in self._aborted_producers:
                    return ()
            # Transaction markers are not records, in either isolation level.
            if batch.is_control_batch:
                return ()
        codec = getattr(batch, "compression_type", None)
        if codec not in _OUR_CODECS:
            detail = "its format is older than Kafka 0.11"  # aiokafka's class for it has no codec
            if codec is not None:
                name = _CODECS.get(codec, f"codec {codec}")
                detail = f"it is compressed with {name}; expected zstd or no compression"
            raise UnreadableError(detail, reason=UnreadableReason.CODEC)
        count = batch.last_offset_delta + 1  # as written; compaction does not change it
        if count > MAX_BATCH_RECORDS:
            raise UnreadableError(
                f"it has too many records: {count}, maximum {MAX_BATCH_RECORDS}",
                reason=UnreadableReason.TOO_MANY,
            )
        records: Iterable[Any] = batch
        return records

    def _skip(self, batch: Any, error: Exception) -> Iterator[Record]:  # noqa: ANN401  # untyped
        """Yield one placeholder record for the unreadable rest of a batch."""
        topic, partition = self._tp
        first_offset = max(self.next_fetch_offset, getattr(batch, "base_offset", 0))
        next_offset = batch.next_offset
        if first_offset >= next_offset:
            return  # all its records were already read
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
    """The records in one partition's response that were not polled yet."""

    _partition_records: PartitionBatches | None

    @override
    def getall(self, max_records: int | None = None) -> list[Record]:
        """Return at most `max_records` records, or fewer if the turn is used up; keep the rest."""
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
    """Raise `UnreadableError` if `count` exceeds `MAX_RECORD_HEADERS`."""
    if count > MAX_RECORD_HEADERS:
        raise UnreadableError(
            f"a record has too many headers: {count}, maximum {MAX_RECORD_HEADERS}",
            reason=UnreadableReason.TOO_MANY,
        )


def _too_large(size: str) -> UnreadableError:
    return UnreadableError(
        f"it is too large: {size} bytes unpacked, maximum {MAX_UNPACKED_BYTES}",
        reason=UnreadableReason.TOO_LARGE,
    )


def _raise_other_offsets(batch: Any, offset: int) -> Never:  # noqa: ANN401  # untyped
    raise UnreadableError(
        f"its records' offsets do not rise from {batch.base_offset} to {batch.next_offset - 1}:"
        f" found {offset}",
        reason=UnreadableReason.DAMAGED,
    )
