"""Reads XIDs from the kernel log, because some XIDs never appear in the driver's events.

This module follows the log from its end and computes the time of each record.
`gpuledger_agent.core.incidents` parses the driver's lines and removes duplicates.
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from gpuledger.clock import NS_PER_US, Clock
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.incidents import Detection, read_bus, read_xid_line, write_bus
from gpuledger_agent.metrics import KMSG_FAILURES, KMSG_OVERRUNS

SOURCE: Final = "kmsg"
_DRIVER_PREFIX: Final = b"NVRM: Xid"
_RECORD_BYTES: Final = 8192
_POLL_SECONDS: Final = 0.5
# Maximum number of records read at once, so that many records do not delay ticks.
_MAX_AT_ONCE: Final = 1000
_HEAD: Final = re.compile(r"(\d{1,9}),\d+,(\d{1,19})(?!\d)", re.ASCII)
"""The start of a record: facility and level, sequence number, time stamp in microseconds."""
_FIRST_OF_PROGRAMS: Final = 8
"""A record starts with the number 8 * facility + level. The kernel's facility is 0, so records that
programs write start with at least this number."""


class Kmsg(Protocol):
    """An open kernel log; it returns the records that are written after it was opened."""

    def read(self) -> bytes:
        """Return the next record or records.

        Raise `BlockingIOError` if there is no new record, `BrokenPipeError` once if records were
        overwritten before they were read, and `OSError` if the log can no longer be read.
        """

    def close(self) -> None:
        """Close the log."""


class DeviceKmsg:
    """`/dev/kmsg`, or a file in the same format."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A pipe cannot seek, and does not need to, because it has no old records.
        with suppress(OSError):
            os.lseek(self._file, 0, os.SEEK_END)

    def read(self) -> bytes:
        """Return the next record; raises BlockingIOError, BrokenPipeError or OSError."""
        if not (record := os.read(self._file, _RECORD_BYTES)):
            raise BlockingIOError
        return record

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RecordTime:
    """Converts the log's time stamps to wall-clock time.

    The clock of the time stamps is close to the time since boot, but drifts from it and stops while
    the machine is suspended. A record's time is therefore corrected to a possible time: after the
    log was last found without new records, and before now.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._empty_ns = clock.boottime_ns()

    def nothing_new(self) -> None:
        """Record that the log has no new records at this time."""
        self._empty_ns = self._clock.boottime_ns()

    def time_ns(self, stamp_us: int) -> int:
        """Return the time of a record that was just read, in nanoseconds since the epoch.

        `stamp_us` is the record's time stamp.
        """
        now_ns = self._clock.boottime_ns()
        written_ns = min(max(stamp_us * NS_PER_US, self._empty_ns), now_ns)
        return self._clock.time_ns() - (now_ns - written_ns)


class KmsgReader:
    """Follows the kernel log, and reports each XID that the driver has logged."""

    def __init__(
        self,
        *,
        open_log: Callable[[], Kmsg],
        clock: Clock,
        buses: Callable[[], Mapping[str, str]],
        on_detection: Callable[[Detection], None],
        check: Check,
        backoff: Backoff,
    ) -> None:
        self._open_log = open_log
        self._clock = clock
        self._buses = buses
        self._on_detection = on_detection
        self._check = check
        self._backoff = backoff
        self._record_time = RecordTime(clock)

    async def run(self) -> None:
        """Follow the log until cancelled; if it cannot be read, reopen it after a backoff."""
        while True:
            try:
                log = self._open_log()
                self._check.ok()
                self._record_time.nothing_new()
                try:
                    while True:
                        # If more records are left, only yield to other tasks.
                        is_more = self.read(log)
                        await self._clock.sleep(0 if is_more else _POLL_SECONDS)
                finally:
                    log.close()
            except OSError as error:
                KMSG_FAILURES.inc()
                self._check.failed(f"cannot read the kernel log: {error}")
                # Not a `RetryingCaller`, because this call never succeeds by returning: the backoff
                # is reset when the log has been read to its end.
                await self._clock.sleep(self._backoff.next_seconds())

    def read(self, log: Kmsg) -> bool:
        """Read the new records, at most `_MAX_AT_ONCE`; return whether there may be more."""
        for _ in range(_MAX_AT_ONCE):
            try:
                record = log.read()
            except BlockingIOError:
                self._backoff.reset()
                self._record_time.nothing_new()
                return False
            # The kernel reports an overrun once, then continues with the oldest remaining record.
            except BrokenPipeError:
                KMSG_OVERRUNS.inc()
                continue
            # Most records are not from the driver, so compare the bytes before decoding.
            if _DRIVER_PREFIX in record:
                self._read_record(record)
        return True

    def _read_record(self, record: bytes) -> None:
        # The kernel ends lines only with \n; a message may contain other line separators.
        for text in record.decode(errors="replace").split("\n"):
            head, _, words = text.partition(";")
            stamp, line = _HEAD.match(head), read_xid_line(words)
            # Programs can write to the log too, so accept only records of the kernel.
            if stamp and line and int(stamp[1]) < _FIRST_OF_PROGRAMS:
                uuids = (
                    uuid for address, uuid in self._buses().items() if read_bus(address) == line.bus
                )
                self._on_detection(
                    Detection(
                        kind="xid",
                        # A GPU that never answered has no known UUID, only its PCI address.
                        gpu_uuid=next(uuids, write_bus(line.bus)),
                        time_ns=self._record_time.time_ns(int(stamp[2])),
                        source=SOURCE,
                        xid=line.xid,
                        gpu_instance=line.gpu_instance,
                        compute_instance=line.compute_instance,
                        action=line.action,
                        severity=line.severity,
                        detail=line.words or None,
                        pid=line.pid,
                        command=line.command,
                    )
                )
