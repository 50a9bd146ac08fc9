"""A clock of seconds that the test moves by hand, in the place of `time.monotonic`."""


class Seconds:
    """Returns the same time until it is moved on."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        return self.now_seconds

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now_seconds += seconds
