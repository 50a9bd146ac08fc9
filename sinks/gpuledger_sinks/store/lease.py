"""Who maintains a store: a row in the small table `leases`.

Its commit fails where somebody else has written one since it was read (Delta's transaction
identifiers, as for offsets), so that it holds on every storage that a Delta table may lie on.
Whoever dies leaves one that ends by itself.

It saves work, and is no lock: of two machines whose clocks differ by more than it lasts, one takes
it while the other is at work. What both do then is safe by itself, as each commit of a maintainer
is refused where another one has changed the same since.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import LEASES
from gpuledger_sinks.store.table import StaleTableError, StreamTable

LEASE_SECONDS: Final = 900.0
_RENEWED_SECONDS: Final = LEASE_SECONDS / 3
_LONGEST_SECONDS: Final = 86_400
"""A lease that ends later was written by a clock that is wrong: nobody waits for it."""
_STREAM: Final = "gpuledger-maintainer"
_KEPT_LEASES: Final = 10
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldLease:
    """A lease that somebody has."""

    holder: str
    until_us: int
    """When it ends by itself, by its holder's clock, since 1970."""

    @property
    def until(self) -> str:
        """When it ends, for people."""
        return f"{datetime.fromtimestamp(self.until_us // 1_000_000, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"


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
        self._renewed_ns: int | None = None

    def acquire(self, seconds: float = LEASE_SECONDS) -> bool:
        """Take the lease, or renew it; return whether this holder has it now.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        # Loaded right before, and the append goes through what was loaded: of two who find the
        # lease free, the second one's commit fails.
        number = self._table.load([_STREAM]).get(_STREAM, 0)
        if self._other() is not None:
            return False
        now_us = self._clock.time_ns() // NS_PER_US
        until_us = now_us + round(seconds * 1_000_000)
        try:
            self._table.append(
                [(number + 1, self._holder, until_us)],
                {_STREAM: number + 1},
                time_ms=now_us // 1000,
            )
        except StaleTableError:
            return False
        self._renewed_ns = self._clock.monotonic_ns()
        return True

    def renew(self) -> None:
        """Take the lease anew once a third of it is over; raises StaleTableError where it is lost.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        # By the clock that is not set: of its own time the holder is sure, whatever the other says.
        # Not with each step, as every renewal is a commit.
        renewed_ns, now_ns = self._renewed_ns, self._clock.monotonic_ns()
        if renewed_ns is not None and now_ns - renewed_ns < _RENEWED_SECONDS * NS_PER_SECOND:
            return
        if not self.acquire():
            raise StaleTableError(f"store {self._table.uri}: somebody else has the lease")

    def held_by_another(self) -> HeldLease | None:
        """Return the lease that somebody else has now; absent where nobody has one.

        Raises ReceiverUnavailableError where the storage does not answer.
        """
        # Loading would make the table, and whoever asks changes nothing.
        if not self._table.exists():
            return None
        self._table.load([_STREAM])
        return self._other()

    def release(self) -> None:
        """Let another one have it, and forget who had it long ago."""
        if self.acquire(0.0):
            number = self._table.load([_STREAM])[_STREAM]
            self._table.remove_rows(f"number < {number - _KEPT_LEASES}")

    def _other(self) -> HeldLease | None:
        # The last one written holds, not the one that ends last: whoever released it wrote one that
        # has ended.
        row = self._table.newest_row("number", ("holder", "until_us"))
        now_us = self._clock.time_ns() // NS_PER_US
        if row is None or row[0] == self._holder or row[1] <= now_us:
            return None
        held = HeldLease(holder=row[0], until_us=row[1])
        if held.until_us > now_us + _LONGEST_SECONDS * 1_000_000:
            _log.warning(
                "far_lease_ignored",
                url=shown_url(self._table.uri),
                holder=held.holder,
                until=held.until,
            )
            return None
        return held
