"""What a receiver can answer other than yes.

Here live the two errors that a client of a receiver raises. What is done about them is decided by
the loops around it.
"""

from gpuledger.errors import GpuledgerError, UnavailableError


class ReceiverUnavailableError(UnavailableError):
    """The receiver did not answer, or asked to be tried again later."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """How long the receiver asked to be left alone; 0 where it did not say."""


class RejectedError(GpuledgerError):
    """The receiver refused for good; the message is the receiver's own, unchanged."""
