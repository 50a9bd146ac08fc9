"""Transactions on the bus in memory: all checks first, then everything between two awaits."""

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from gpuledger.bus.memory_log import PartitionLog
from gpuledger.bus.memory_producer import check_batch
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import FencedError

Owners = MutableMapping[str, object]
CommitOffsets = Callable[[str, Mapping[TopicPartition, int]], None]


class MemoryTransactions:
    """Commits as long as nobody else opened the same id."""

    def __init__(
        self,
        *,
        transactional_id: str,
        owners: Owners,
        logs: Mapping[TopicPartition, PartitionLog],
        commit_offsets: CommitOffsets,
    ) -> None:
        self._id = transactional_id
        self._owners = owners
        self._logs = logs
        self._commit_offsets = commit_offsets
        owners[transactional_id] = self

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        """Publish and commit at once; `FencedError` where the id was opened anew."""
        checked = [(check_batch(self._logs, place, each), each) for place, each in messages.items()]
        if self._owners[self._id] is not self:
            raise FencedError(f"another writer took over the transactional id {self._id!r}")
        for log, batch in checked:
            log.append(batch)
        self._commit_offsets(group, offsets)
        # A publisher that never waits would keep every consumer from running.
        await asyncio.sleep(0)
