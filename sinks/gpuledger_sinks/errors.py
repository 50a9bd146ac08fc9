"""The errors of a receiver's client, and the retries after them.

While a receiver is unavailable, requests are repeated. The code that calls the client decides what
to do with data that the receiver rejects completely or partly.
"""

from gpuledger.clock import Clock
from gpuledger.errors import GpuledgerError, UnavailableError
from gpuledger.runtime import Check, RetryingCaller
from gpuledger_sinks.metrics import RETRIES_TOTAL


class ReceiverUnavailableError(UnavailableError):
    """The receiver did not answer, or answered with a temporary failure."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """How long the receiver asked to wait before a retry; 0 if it did not ask."""


class DiskFullError(ReceiverUnavailableError):
    """The receiver is a directory whose disk is full; only a person can change this."""


class RejectedError(GpuledgerError):
    """The receiver rejected the data permanently; the message is the receiver's own, unchanged."""


class PartialWriteError(RejectedError):
    """The receiver wrote a part of a request and rejected the rest permanently.

    The request must not be sent again. The receiver does not report which part it wrote.
    """

    def __init__(self, message: str, *, written: int, samples: int) -> None:
        super().__init__(f"{written} of {samples} samples were written: {message}")
        self.written = written
        """Number of samples written."""


def retry_receiver(
    *,
    sink: str,
    check: Check,
    clock: Clock,
    receiver: str = "",
    passes_check: bool = True,
    disk_check: Check | None = None,
) -> RetryingCaller[ReceiverUnavailableError]:
    """Return a caller that retries a sink's requests while the receiver is unavailable.

    A passing `check` shows the text `receiver`. `disk_check` fails only if the disk is full.
    """
    return RetryingCaller(
        on=ReceiverUnavailableError,
        check=check,
        receiver=receiver,
        passes_check=passes_check,
        counter=RETRIES_TOTAL.labels(sink=sink),
        clock=clock,
        min_seconds=lambda error: error.retry_after_seconds,
        checks_by_error={} if disk_check is None else {DiskFullError: disk_check},
    )
