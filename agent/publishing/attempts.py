"""When the disk is asked again for what it has refused. Pure: nobody waits here."""

from collections.abc import Callable

from gpuledger.runtime import Backoff


class Attempts:
    """One kind of work of the disk, such as its reads: its last error, and the wait after it."""

    def __init__(self, *, backoff: Backoff, now_seconds: Callable[[], float]) -> None:
        self._backoff = backoff
        self._now_seconds = now_seconds
        self._until_seconds = 0.0
        self.error: OSError | None = None
        """What it refused, until it has worked."""

    @property
    def wait_seconds(self) -> float:
        """How long it is not to be asked."""
        return max(0.0, self._until_seconds - self._now_seconds()) if self.error else 0.0

    @property
    def is_due(self) -> bool:
        """Whether it has refused, and may be asked again now."""
        return self.error is not None and not self.wait_seconds

    def failed(self, error: OSError) -> None:
        """Record a refusal, and begin the wait after it."""
        self.error = error
        self._until_seconds = self._now_seconds() + self._backoff.next_seconds()

    def worked(self) -> None:
        """Record that it worked."""
        self.error = None
        self._backoff.reset()

    def hurry(self) -> None:
        """End the wait."""
        self._until_seconds = 0.0
