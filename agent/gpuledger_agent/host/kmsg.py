"""The kernel's log as a second source of XIDs: some never reach the driver's events.

Here lives the reading, from the log's end on, and the time of a record. The driver's lines are read
by `gpuledger_agent.core.incidents`, and what is new is decided there.
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
# A log in a storm is never read to its end: the ticks' turn comes first.
_MAX_AT_ONCE: Final = 1000
_HEAD: Final = re.compile(r"(\d{1,9}),\d+,(\d{1,19})(?!\d)", re.ASCII)
"""Facility with level, number, stamp."""
_FIRST_OF_PROGRAMS: Final = 8
"""The kernel's own facility is 0, and the three bits below it are the level."""


class Kmsg(Protocol):
    """An open kernel log, behind the last record of the time when it was opened."""

    def read(self) -> bytes:
        """Return the next record, or several.

        Raises BlockingIOError where there is none yet, BrokenPipeError once where records were
        overwritten before they were read, and OSError where the log is lost.
        """

    def close(self) -> None:
        """Let go of it."""


class DeviceKmsg:
    """`/dev/kmsg`, or a file in its form."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A pipe has no end to go to, and nothing old either.
        with suppress(OSError):
            os.lseek(self._file, 0, os.SEEK_END)

    def read(self) -> bytes:
        """Return what can be read; raises BlockingIOError, BrokenPipeError or OSError."""
        if not (record := os.read(self._file, _RECORD_BYTES)):
            raise BlockingIOError
        return record

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RecordTime:
    """From the log's stamps to the wall clock.

    The stamps' clock is near the time since boot, but drifts from it, and stands still while a
    machine is suspended. So a stamp counts as far as it can be true: a record was written after
    the log was last seen empty, and before now.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._empty_ns = clock.boottime_ns()

    def nothing_new(self) -> None:
        """Record that the log holds nothing unread."""
        self._empty_ns = self._clock.boottime_ns()

    def time_ns(self, stamp_us: int) -> int:
        """Return when a record was written that was read just now, nanoseconds since the epoch."""
        now_ns = self._clock.boottime_ns()
        written_ns = min(max(stamp_us * NS_PER_US, self._empty_ns), now_ns)
        return self._clock.time_ns() - (now_ns - written_ns)


class KmsgReader:
    """Follows the kernel's log for ever."""

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
        """Follow the log for ever; one that cannot be read is tried again, with a back-off."""
        while True:
            try:
                log = self._open_log()
                self._check.ok()
                self._record_time.nothing_new()
                try:
                    while True:
                        # Where more is left, the others get their turn and the log is read on.
                        is_more = self.read(log)
                        await self._clock.sleep(0 if is_more else _POLL_SECONDS)
                finally:
                    log.close()
            except OSError as error:
                KMSG_FAILURES.inc()
                self._check.failed(f"cannot read the kernel's log: {error}")
                # Not a `RetryingCaller`: what is repeated has no end, so that the first record that
                # is read resets the waits.
                await self._clock.sleep(self._backoff.next_seconds())

    def read(self, log: Kmsg) -> bool:
        """Read what there is, at most a thousand records; tells whether there may be more."""
        for _ in range(_MAX_AT_ONCE):
            try:
                record = log.read()
            except BlockingIOError:
                self._backoff.reset()
                self._record_time.nothing_new()
                return False
            # The kernel says so once, and goes on with the oldest record that is left.
            except BrokenPipeError:
                KMSG_OVERRUNS.inc()
                continue
            # Nearly all records are of others; bytes are compared before anything is decoded.
            if _DRIVER_PREFIX in record:
                self._read_record(record)
        return True

    def _read_record(self, record: bytes) -> None:
        # The kernel ends lines with \n alone; any other separator is of the message.
        for text in record.decode(errors="replace").split("\n"):
            head, _, words = text.partition(";")
            stamp, line = _HEAD.match(head), read_xid_line(words)
            # Programs can write there too: only what the kernel itself wrote counts.
            if stamp and line and int(stamp[1]) < _FIRST_OF_PROGRAMS:
                uuids = (
                    uuid for address, uuid in self._buses().items() if read_bus(address) == line.bus
                )
                self._on_detection(
                    Detection(
                        kind="xid",
                        # A GPU that never answered is known by its bus alone; better than nothing.
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
