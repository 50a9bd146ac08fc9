"""Writes requests until they are accepted or rejected, and limits requests that always fail.

A receiver may answer a request with 5xx indefinitely, and the protocol requires retries. The
retries end with `FailingError` only if the receiver accepts other requests meanwhile. A request
with several ticks is divided after a tenth of `poison_seconds`; a single tick becomes a dead letter
after the full time. While the receiver accepts no request, all requests wait.
"""

from itertools import count
from typing import Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_SECOND, Clock
from gpuledger.runtime import RetryingCaller
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.write_client import Payload, RemoteWriteClient

_TAKES_OTHERS_NS: Final = NS_PER_MINUTE
"""A receiver that accepted another request within this time counts as working."""
_POISON_ATTEMPTS: Final = 5
_DIVIDED_PART: Final = 10
"""A request with several ticks is divided after `poison_seconds` divided by this number."""


class FailingError(RejectedError):
    """The receiver fails repeatedly on this request but accepts others; contains its message."""


class Writer:
    """Writes requests until they are accepted or rejected.

    All partitions share one writer, which therefore detects whether a receiver that fails on one
    request accepts others.
    """

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        retry: RetryingCaller[ReceiverUnavailableError],
        clock: Clock,
        poison_seconds: float,
    ) -> None:
        """Write with `client`; a tick is rejected after `poison_seconds` of failures (0: never)."""
        self._client, self._retry, self._clock = client, retry, clock
        self._poison_ns = round(poison_seconds * NS_PER_SECOND)
        self._taken_ns = -_TAKES_OTHERS_NS

    async def write(self, message: Payload, *, ticks: int) -> int:
        """Write a request of `ticks` ticks; return how many samples the receiver has written.

        Raises PartialWriteError and RejectedError as `RemoteWriteClient.write` does. Raises
        FailingError if the receiver keeps failing on this request but accepts others.
        """
        begun_ns, attempts = self._clock.monotonic_ns(), count()

        async def attempt() -> int:
            number = next(attempts)
            try:
                return await self._client.write(message, attempt=number)
            except ReceiverUnavailableError as error:
                if self._is_poison(begun_ns, attempts=number + 1, ticks=ticks):
                    raise FailingError(str(error)) from error
                raise

        written = await self._retry(attempt)
        self._taken_ns = self._clock.monotonic_ns()
        return written

    def _is_poison(self, begun_ns: int, *, attempts: int, ticks: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        limit_ns = self._poison_ns // _DIVIDED_PART if ticks > 1 else self._poison_ns
        takes_others = self._taken_ns > begun_ns and now_ns - self._taken_ns < _TAKES_OTHERS_NS
        is_long = attempts >= _POISON_ATTEMPTS and now_ns - begun_ns >= limit_ns
        return bool(limit_ns) and takes_others and is_long
