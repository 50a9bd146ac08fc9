"""What repeats is written once a minute for each key, with its number."""

from gpuledger.runtime.logs import Repeats


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


def test_keys_beyond_the_bound_share_one_line_a_minute() -> None:
    """Whoever makes keys up gets no line for each, however often he goes round."""
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    lines = []
    for seconds.now in (0, 10, 60, 70):
        counts = [repeats.count(key) for key in range(1200)]
        lines.append((sum(map(bool, counts)), sum(counts)))

    # Each of 1,000 and one for 200; quiet; then all that was left out is told of; quiet again.
    assert lines == [(1001, 1001), (0, 0), (1001, 2400), (0, 0)]


def test_a_key_gives_its_line_up_once_it_has_been_quiet() -> None:
    """What was left out of it is told with the others."""
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    for key in [*range(1000), 0, 0]:
        repeats.count(key)
    seconds.now = 60

    assert [repeats.count(key) for key in ("new", "new")] == [1, 0]
    for key in range(1, 1000):
        repeats.count(key)
    assert repeats.count("beyond") == 3
