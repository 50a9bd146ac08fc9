"""The ticks seen, stored with the tables so that each tick counts once even after a restart.

A tick may be published again at any time, for example after offsets were reset. The sink detects
this by the last tick of each boot of the node (`gpuledger_sinks.timelines.SeenTicks`). This state
must match the offset at which the sink resumes. With the state of an earlier offset ticks would
count twice; with that of a later one, ticks that were never stored would be skipped.

Right before a commit moves a partition to an offset, a row with the ticks seen up to that offset is
therefore appended to the small table `seen_samples`, under the stream and the offset. A sink that
resumes after an offset looks for the row of that offset. The row depends only on the partition's
records up to there, so it does not matter which sink wrote it:

- killed before the row: the tables and the ticks seen are still at the previous offset;
- killed between row and commit: no table has the row's offset, so nothing ever reads the row;
- two sinks with the same partition, because one does not know yet that it lost it: both write
  correct rows, and the tables refuse the later commit.

Rows before the offsets of the tables are removed from time to time. The table has its own log,
which is short-lived, so a commit per flush does not lengthen the other tables' logs.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import CommitFailedError

from gpuledger.store.query import quoted
from gpuledger.store.schema import SEEN_TICKS
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import StreamTable

_KEPT_HOURS: Final = 2
"""How long removed files are kept: longer than any writer or reader needs them."""

NodeTicks = Mapping[str, Any]
"""The last tick of each boot of each node, as `SeenTicks` returns it."""


class SeenTable(StreamTable):
    """The table `seen_samples` of a store."""

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(SEEN_TICKS, store_uri=store_uri, storage_options=storage_options)

    def record(self, seen: Mapping[str, tuple[int, NodeTicks]], *, written_us: int) -> None:
        """Append the ticks seen of each stream up to an offset, even if another sink does the same.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        rows = [
            (stream, last_offset, orjson.dumps(ticks).decode(), written_us)
            for stream, (last_offset, ticks) in sorted(seen.items())
        ]
        # Without a transaction identifier, because all rows of one offset are alike.
        with storage_errors(self.uri):
            write_deltalake(
                self.open(),
                self._schema.table_of(rows),
                mode="append",
                writer_properties=self.writer,
            )

    def read(self, offsets: Mapping[str, int]) -> dict[str, tuple[int, NodeTicks]]:
        """Return for each stream the ticks seen up to its offset, or the nearest one before it.

        Each comes with its offset; streams without rows are absent. Raises
        ReceiverUnavailableError if the storage does not answer.
        """
        if not offsets:
            return {}
        with storage_errors(self.uri):
            query = QueryBuilder().register(SEEN_TICKS.name, self.open())
            wanted = " OR ".join(
                f"(stream = {quoted(stream)} AND last_offset <= {offset})"
                for stream, offset in offsets.items()
            )
            # A repeated commit writes a row twice; either of them is correct.
            found = query.execute(
                "SELECT stream, last_offset, seen FROM (SELECT *, row_number()"  # noqa: S608  # quoted streams
                " OVER (PARTITION BY stream ORDER BY last_offset DESC) AS number"
                f" FROM {SEEN_TICKS.name} WHERE {wanted}) WHERE number = 1"
            ).read_all()
        columns = [found[name].to_pylist() for name in ("stream", "last_offset", "seen")]
        return {
            stream: (last_offset, orjson.loads(seen))
            for stream, last_offset, seen in zip(*columns, strict=True)
        }

    def prune(self, offsets: Mapping[str, int]) -> None:
        """Remove rows before these offsets, and the files of rows that were removed earlier.

        Does nothing if another writer does the same. Raises ReceiverUnavailableError if the storage
        does not answer.
        """
        if not offsets:
            return
        outdated = " OR ".join(
            f"(stream = {quoted(stream)} AND last_offset < {offset})"
            for stream, offset in offsets.items()
        )
        with storage_errors(self.uri):
            table: DeltaTable = self.open()
            # Removes whole files and rewrites none: all rows of a flush become outdated together.
            try:
                table.delete(outdated)
            except CommitFailedError:
                return
            table.vacuum(
                retention_hours=_KEPT_HOURS,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
