"""The ticks seen, stored with the tables so that each tick counts once even after a restart.

A tick may be published again at any time, for example after offsets were reset. The sink detects
this by the last tick of each boot of the node (`gpuledger_sinks.timelines.SeenTicks`). This state
must match the offset at which the sink resumes. With the state of an earlier offset, ticks would
count twice. With the state of a later offset, ticks that were never stored would be skipped.

Right before a commit moves a partition to an offset, a row with the ticks seen up to that offset is
therefore appended to the small table `seen_samples`, with the stream and the offset. A sink that
resumes after an offset reads the row of that offset. The row depends only on the partition's
records up to that offset, so the row is correct whichever sink wrote it:

- If a sink is killed before it writes the row, the tables are still at the previous offset.
- If a sink is killed between row and commit, no table is at the row's offset, so the row is unused.
- If two sinks write a partition, because one has not noticed yet that the partition was revoked,
  both write correct rows, and the tables reject the later commit.

Rows before the offsets of the tables are removed from time to time. The table has its own log, so a
commit per flush does not lengthen the logs of the other tables.
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
"""Hours for which removed files are kept; longer than any reader or writer needs them."""

NodeTicks = Mapping[str, Any]
"""The last tick of each boot of each node, as `SeenTicks` returns it."""


class SeenTable(StreamTable):
    """The table `seen_samples` of a store."""

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(SEEN_TICKS, store_uri=store_uri, storage_options=storage_options)

    def record(self, seen: Mapping[str, tuple[int, NodeTicks]], *, written_us: int) -> None:
        """Append the ticks seen of each stream; another sink may append the same.

        Each stream has the offset up to which its ticks were seen. Raises ReceiverUnavailableError
        if the storage does not answer.
        """
        rows = [
            (stream, last_offset, orjson.dumps(ticks).decode(), written_us)
            for stream, (last_offset, ticks) in sorted(seen.items())
        ]
        # No transaction identifier is needed, because all rows of one offset are equal.
        with storage_errors(self.uri):
            write_deltalake(
                self.open(),
                self._schema.table_of(rows),
                mode="append",
                writer_properties=self.writer,
            )

    def read(self, offsets: Mapping[str, int]) -> dict[str, tuple[int, NodeTicks]]:
        """Return for each stream the ticks seen up to its offset, or up to the nearest one before.

        Each result contains the offset that was found; streams without rows are left out. Raises
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
            # A repeated commit writes a row twice; both rows are correct.
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
