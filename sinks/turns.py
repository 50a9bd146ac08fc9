"""One partition at a time works on what is large; the others go side by side.

An event of a message's size may come to a hundred times as much in labels, and take seconds to be
made so. With one of them in each partition, a sink would hold all of that at once, and answer no
probe until the last of them is made.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from sinks.protocol import Batch

LARGE_BYTES: Final = 131_072
"""An event of 16 GPUs and a hundred pods has 50 kB."""


class LargeTurns:
    """The turn of the partition that works on what is large."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def take(self, batch: Batch) -> AbstractAsyncContextManager[None]:
        """Return what waits, where there is something large in a batch, for its turn."""
        is_large = any(len(record.value or b"") > LARGE_BYTES for record, _ in batch.items)
        return self._turn if is_large else nullcontext()
