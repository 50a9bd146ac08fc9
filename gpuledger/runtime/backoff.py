"""How long to wait before the next attempt. Pure: it counts attempts, it does not wait."""

import random
from collections.abc import Callable


class Backoff:
    """Waits that double from attempt to attempt, each by chance between half and the whole of it.

    The chance keeps clients that failed together from coming back together.
    """

    def __init__(
        self,
        *,
        first_seconds: float = 0.5,
        max_seconds: float = 30.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < first_seconds <= max_seconds:
            raise ValueError(f"expected 0 < first ({first_seconds}) <= most ({max_seconds})")
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._jitter = jitter
        self._ceiling_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return the seconds to wait before the next attempt, and count that attempt."""
        ceiling = self._ceiling_seconds
        self._ceiling_seconds = min(2 * ceiling, self._max_seconds)
        return ceiling / 2 * (1 + self._jitter())

    def reset(self) -> None:
        """Begin again with the first wait, after an attempt that succeeded."""
        self._ceiling_seconds = self._first_seconds
