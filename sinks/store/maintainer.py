"""What a store needs beside new rows, by one who does it at a time.

`MaintenanceLease` says who: a row in the small table `leases`, whose commit fails where somebody
else has written one since it was read (Delta's transaction identifiers, as for offsets), so that it
holds on every storage that a Delta table may lie on. Whoever dies leaves one that ends by itself.

`Maintainer` does it: sums up hours and days, removes what is older than its retention, and merges
the small files of a day into few. Merging never touches rows, and is refused where deltalake would
accept it twice from two who do not know of one another (`is_compaction_safe`): versions that do
have been released, and each row would be there twice.
"""

import socket
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from arro3.core import Array, DataType, Field, Schema, Table
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from gpuledger.clock import NS_PER_DAY, NS_PER_MS, NS_PER_US, Clock
from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import ENTRIES, GAPS, LEASES, PARTITION_COLUMN, PODS, TableSchema
from gpuledger.store.usage_schema import (
    INCIDENTS,
    INVENTORY,
    NAMESPACES,
    NODES,
    USAGE,
    USAGE_DAILY,
    USAGE_HOURLY,
)
from sinks.errors import ReceiverUnavailableError
from sinks.settings import StoreSettings
from sinks.store.damage import storage_errors
from sinks.store.rollups import DAILY, HOURLY, Rollup
from sinks.store.table import StaleTableError, StreamTable

LEASE_SECONDS: Final = 900.0
_STREAM: Final = "gpuledger-maintainer"
_SMALL_BYTES: Final = 32 * 2**20
_MIN_FILES: Final = 8
"""Small files of a day, or of a table without days, from which on they are merged."""
_KEPT_LEASES: Final = 10
PARTITIONED: Final = (USAGE, USAGE_HOURLY, USAGE_DAILY, ENTRIES)
_OTHERS: Final = (PODS, NODES, NAMESPACES, INVENTORY, INCIDENTS, GAPS)
_log = structlog.get_logger(__name__)


class MaintenanceLease:
    """The right to maintain a store, for a while."""

    def __init__(
        self,
        *,
        store_uri: str,
        storage_options: Mapping[str, str] | None = None,
        holder: str,
        clock: Clock,
    ) -> None:
        self._table = StreamTable(LEASES, store_uri=store_uri, storage_options=storage_options)
        self._holder, self._clock = holder, clock

    def acquire(self, seconds: float = LEASE_SECONDS) -> bool:
        """Take the lease, or renew it; return whether this holder has it now.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        # Loaded right before, and the append goes through what was loaded: of two who find the
        # lease free, the second one's commit fails.
        number = self._table.load([_STREAM]).get(_STREAM, 0)
        now_us = self._clock.time_ns() // NS_PER_US
        held = self._table.newest_row("number", ("holder", "until_us"))
        if held is not None and held[0] != self._holder and held[1] > now_us:
            return False
        until_us = now_us + round(seconds * 1_000_000)
        try:
            self._table.append(
                [(number + 1, self._holder, until_us)],
                {_STREAM: number + 1},
                time_ms=now_us // 1000,
            )
        except StaleTableError:
            return False
        return True

    def release(self) -> None:
        """Let another one have it, and forget who had it long ago."""
        if self.acquire(0.0):
            number = self._table.load([_STREAM])[_STREAM]
            self._table.remove_rows(f"number < {number - _KEPT_LEASES}")


def is_compaction_safe() -> bool:
    """Return whether deltalake refuses the second of two compactions of the same files."""
    schema = Schema([Field("number", DataType.int64(), nullable=False)])
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            column = Array([number], type=DataType.int64())
            write_deltalake(folder, Table.from_arrays([column], schema=schema), mode="append")
        # Both know the same files; the second one does not hear of what the first one does.
        first, second = DeltaTable(folder), DeltaTable(folder)
        first.optimize.compact()
        try:
            second.optimize.compact()
        except CommitFailedError:
            return True
        counts = DeltaTable(folder).get_add_actions(flatten=True)["num_records"].to_pylist()
        return bool(sum(counts) == 4)  # noqa: PLR2004  # the rows that were written above


@dataclass
class MaintenanceDone:
    """What a run of the maintainer did."""

    hours: int = 0
    """How many hours were summed up."""
    days: int = 0
    purged_files: int = 0
    compacted_files: int = 0
    is_held_by_another: bool = False
    """Whether nothing was done, as somebody else is at it."""


class Maintainer:
    """Maintains the tables of a store. All of it blocks, and belongs in a thread."""

    def __init__(self, settings: StoreSettings, *, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._where: dict[str, Any] = {
            "store_uri": settings.uri,
            "storage_options": settings.storage_options,
        }
        # Two of one machine are told apart, and so is one that is started anew.
        holder = f"{socket.gethostname()}/{clock.monotonic_ns()}/{id(self)}"
        self._lease = MaintenanceLease(**self._where, holder=holder, clock=clock)
        self._hourly = Rollup(HOURLY, **self._where)
        self._daily = Rollup(DAILY, **self._where)
        self._is_safe: bool | None = None

    def run(self) -> MaintenanceDone:
        """Do what is due, and return what that was.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        done = MaintenanceDone()
        if not self._lease.acquire():
            done.is_held_by_another = True
            return done
        try:
            self._sum_up(done)
            self._purge(done)
            self._compact(done)
        # What the storage refuses goes to who asked for the run; the lease is let go all the same,
        # where the storage lets it.
        except StaleTableError as error:
            # Whoever took the lease when ours had ended does the same; the next run goes on.
            _log.info("maintenance_withdrawn", error=str(error))
        finally:
            self._lease.release()
        return done

    def _sum_up(self, done: MaintenanceDone) -> None:
        time_ms = self._clock.time_ns() // NS_PER_MS
        # In this order: days are made of hours.
        done.hours = self._hourly.run(time_ms=time_ms)
        done.days = self._daily.run(time_ms=time_ms)

    def _purge(self, done: MaintenanceDone) -> None:
        """Remove what is older than its retention; of what is summed up, only once it is."""
        retention, now_ns = self._settings.retention, self._clock.time_ns()
        today, time_ms = now_ns // NS_PER_DAY, now_ns // NS_PER_MS
        if retention.usage_days:
            done.purged_files += self._hourly.purge(today - retention.usage_days, time_ms=time_ms)
        if retention.usage_hourly_days:
            bound = today - retention.usage_hourly_days
            done.purged_files += self._daily.purge(bound, time_ms=time_ms)
        for schema, days in (
            (USAGE_DAILY, retention.usage_daily_days),
            (ENTRIES, retention.entries_days),
        ):
            if days:
                table = StreamTable(schema, **self._where)
                done.purged_files += table.remove_days_before(today - days)

    def _compact(self, done: MaintenanceDone) -> None:
        # Once a life: the library does not change beneath a process.
        if self._is_safe is None:
            self._is_safe = is_compaction_safe()
        if not self._is_safe:
            _log.warning("compaction_refused", url=shown_url(self._settings.uri))
            return
        for schema in (*PARTITIONED, *_OTHERS):
            table = StreamTable(schema, **self._where)
            if not table.exists():
                continue
            for day in small_files(table, schema):
                # Each takes a while: whoever lost the lease meanwhile leaves the rest.
                if not self._lease.acquire():
                    return
                done.compacted_files += compact(table, day)


def small_files(table: StreamTable, schema: TableSchema) -> list[str | None]:
    """Return the days of which there are many small files; `None` for a table without days."""
    with storage_errors(table.uri):
        actions = table.open().get_add_actions(flatten=True)
    sizes = actions["size_bytes"].to_pylist()
    days = (
        [str(day) for day in actions[f"partition.{PARTITION_COLUMN}"].to_pylist()]
        if schema.partition_by
        else [None] * len(sizes)
    )
    counts = Counter(day for day, size in zip(days, sizes, strict=True) if size < _SMALL_BYTES)
    return [day for day, count in counts.items() if count >= _MIN_FILES]


def compact(table: StreamTable, day: str | None) -> int:
    """Merge the small files of a day; return how many went. Where another was faster, none.

    The table is loaded right before: of what it was a while ago, files may be merged already.
    """
    with storage_errors(table.uri):
        opened = table.open()
        try:
            merged = opened.optimize.compact(
                partition_filters=None if day is None else [(PARTITION_COLUMN, "=", day)],
                writer_properties=table.writer,
            )
        except CommitFailedError as error:
            _log.info("compaction_withdrawn", url=shown_url(table.uri), error=str(error))
            return 0
        except DeltaError as error:
            raise ReceiverUnavailableError(f"store {table.uri}: {error}") from error
    return int(merged["numFilesRemoved"])
