"""The tables of a store at one time, and the time through which its usage is complete.

Each table is opened once, so a bill reads exactly the versions that it shows. `usage_hourly` is
incomplete for hours whose rows arrived after the hours were summed. The later commits of `usage`
contain these hours.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final

from gpuledger.store.commits import (
    PURGED_BEFORE,
    complete_through_us,
    hours_since,
    latest_commits,
    made_ms,
    summed_time,
    summed_up_to,
)
from gpuledger.store.query import days_of_files, open_own_table
from gpuledger.store.schema import TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_HOURLY
from gpuledger_reports.reading.times import DAY_US, HOUR_US

_MAX_COMMITS: Final = 10_000
_MINUTE_US: Final = 60_000_000


class StoreSnapshot:
    """Some tables of a store, each at one version."""

    def __init__(
        self,
        store_uri: str,
        tables: Iterable[TableSchema],
        *,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        # The order of tables matters. If `usage` is opened first, the hourly sums can only include
        # more rows than `usage`, and minutes that are purged meanwhile are still listed.
        self._tables = {
            schema.name: open_own_table(store_uri, schema, storage_options) for schema in tables
        }
        self.files: dict[str, dict[str | None, list[str]]] = {
            name: days_of_files(table) if table else {} for name, table in self._tables.items()
        }
        """The files of each table, by the day in the name of their directory."""
        self.versions = {
            name: table.version() if table else None for name, table in self._tables.items()
        }

    @cached_property
    def changed_hours_us(self) -> frozenset[int] | None:
        """The hours for which `usage` may have rows that `usage_hourly` does not include.

        `None` if unknown: any hour that still has minutes may then be affected. Times are the
        starts of the hours, in microseconds since the epoch.
        """
        usage, hourly = self._tables[USAGE.name], self._tables[USAGE_HOURLY.name]
        if usage is None:
            return frozenset()
        summed = hourly.transaction_version(summed_up_to(USAGE.name)) if hourly else None
        if hourly is None or summed is None:
            return None
        # Includes the last commit that was summed: if its time differs, the table was repaired.
        count = usage.version() - summed + 1
        if count <= 0:
            return frozenset()
        commits = latest_commits(usage, min(count, _MAX_COMMITS))
        if len(commits) < count:
            return None
        summed_ms = hourly.transaction_version(summed_time(USAGE.name))
        is_same = summed_ms is None or summed_ms == made_ms(commits[-1])
        hours = hours_since(commits[:-1]) if is_same else None
        return None if hours is None else frozenset(hour * HOUR_US for hour in hours)

    @cached_property
    def purged_before_us(self) -> int:
        """The time before which minutes in `usage` were purged; 0 if none were."""
        return self._purged_before_us(USAGE.name)

    @cached_property
    def removed_before_us(self) -> int:
        """The time before which retention removed both minutes and hours; 0 if it removed none."""
        return min(self.purged_before_us, self._purged_before_us(USAGE_HOURLY.name))

    def _purged_before_us(self, name: str) -> int:
        table = self._tables[name]
        return ((table.transaction_version(PURGED_BEFORE) or 0) if table else 0) * DAY_US

    @cached_property
    def complete_until_us(self) -> int | None:
        """The minute through which `usage` is complete according to its commits, or `None`."""
        usage = self._tables[USAGE.name]
        if usage is None:
            return None
        # The partition that is furthest behind decides.
        marks = complete_through_us(usage)
        return min(marks.values()) // _MINUTE_US * _MINUTE_US if marks else None
