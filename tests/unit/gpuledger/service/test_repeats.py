"""What repeats is written once a minute for each key, with its number."""

from gpuledger.service.repeats import Repeats


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_is_written_and_the_next_line_counts_what_was_left_out() -> None:
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    counts = []
    for seconds.now in range(0, 130, 10):
        counts.append(repeats.count("a"))

    assert counts == [1, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6]


def test_keys_are_counted_apart() -> None:
    repeats = Repeats(seconds=Seconds())

    assert [repeats.count(key) for key in ("a", "b", "a")] == [1, 1, 0]


def test_memory_is_bounded_whatever_comes() -> None:
    repeats = Repeats(seconds=Seconds())
    for key in range(5000):
        repeats.count(key)

    assert repeats.count(0) == 1
