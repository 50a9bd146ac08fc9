"""What ticks were seen, kept beside the tables so that a tick counts once also after a restart.

A tick may be published again after any time, as after offsets were reset; the sink detects it by
the last tick of each boot of its node (`gpuledger_sinks.timelines.SeenTicks`). That is state of the
sink, and it must be that of the very offset where reading goes on: of an earlier one, ticks would
count twice; of a later one, ticks that were never stored would be passed over.

So right before a commit moves a partition to an offset, a row with what was seen up to that offset
is appended to the small table `seen_samples`, under the stream and the offset. A sink that goes on
behind an offset looks for the row of that offset. What it has follows from the partition's records
up to there and from nothing else, so that it does not matter who wrote it:

- killed before the row: the tables are where they were, and so is what was seen of that offset;
- killed between row and commit: the row is of an offset that no table has, and nobody asks for it;
- two who hold the same partition, one of whom does not know that it lost it: both write rows that
  are true, and the tables refuse the commit of the one that is late.

Rows of before the offsets that the tables have are removed from time to time. The table's log is
its own and short-lived: a commit a flush in it makes none of the others longer.
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
"""How long files stay that were removed: longer than any writer or reader of them takes."""

NodeTicks = Mapping[str, Any]
"""By node the last tick of each of its boots, as `SeenTicks` gives it."""


class SeenTable(StreamTable):
    """The table `seen_samples` of a store."""

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(SEEN_TICKS, store_uri=store_uri, storage_options=storage_options)

    def record(self, seen: Mapping[str, tuple[int, NodeTicks]], *, written_us: int) -> None:
        """Append what was seen of each stream up to an offset, whoever else does the same.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        rows = [
            (stream, last_offset, orjson.dumps(ticks).decode(), written_us)
            for stream, (last_offset, ticks) in sorted(seen.items())
        ]
        # Without an identifier, and by whoever asks: rows of one offset are alike.
        with storage_errors(self.uri):
            write_deltalake(
                self.open(),
                self._schema.table_of(rows),
                mode="append",
                writer_properties=self.writer,
            )

    def read(self, offsets: Mapping[str, int]) -> dict[str, tuple[int, NodeTicks]]:
        """Return of each stream what was seen up to an offset, or up to the nearest one before.

        With it the offset that it is of; nothing of a stream of which nothing was written. Raises
        ReceiverUnavailableError where the storage does not answer.
        """
        if not offsets:
            return {}
        with storage_errors(self.uri):
            query = QueryBuilder().register(SEEN_TICKS.name, self.open())
            wanted = " OR ".join(
                f"(stream = {quoted(stream)} AND last_offset <= {offset})"
                for stream, offset in offsets.items()
            )
            # Written twice where a commit was tried again: either will do.
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
        """Remove what is of before these offsets, and the files of what was removed before.

        Another writer may do the same: then it is done. Raises ReceiverUnavailableError where the
        storage does not answer.
        """
        if not offsets:
            return
        outdated = " OR ".join(
            f"(stream = {quoted(stream)} AND last_offset < {offset})"
            for stream, offset in offsets.items()
        )
        with storage_errors(self.uri):
            table: DeltaTable = self.open()
            # Whole files, as those of a flush are outdated together; nothing is rewritten then.
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
