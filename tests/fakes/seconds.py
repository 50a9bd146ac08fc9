"""A clock of seconds that the test advances, instead of `time.monotonic`."""


class Seconds:
    """Returns the same time until it is advanced."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        return self.now_seconds

    def advance(self, seconds: float) -> None:
        self.now_seconds += seconds
