"""A repeated event is logged once a minute for each key, with its count."""

from gpuledger.runtime.logs import Repeats


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_event_is_logged_and_the_next_line_counts_the_omitted_ones() -> None:
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    counts = []
    for seconds.now in range(0, 130, 10):
        counts.append(repeats.count("a"))

    assert counts == [1, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 6]


def test_keys_are_counted_separately() -> None:
    repeats = Repeats(seconds=Seconds())

    assert [repeats.count(key) for key in ("a", "b", "a")] == [1, 1, 0]


def test_keys_beyond_the_limit_share_one_line_a_minute() -> None:
    """Made-up keys do not get a line each, however often they come."""
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    lines = []
    for seconds.now in (0, 10, 60, 70):
        counts = [repeats.count(key) for key in range(1200)]
        lines.append((sum(map(bool, counts)), sum(counts)))

    # One line for each of 1,000 keys and one for the other 200; quiet; then all omitted ones;
    # quiet.
    assert lines == [(1001, 1001), (0, 0), (1001, 2400), (0, 0)]


def test_a_quiet_key_frees_its_place() -> None:
    """Its omitted events are counted with those of the other keys."""
    seconds = Seconds()
    repeats = Repeats(quiet_seconds=60, seconds=seconds)
    for key in [*range(1000), 0, 0]:
        repeats.count(key)
    seconds.now = 60

    assert [repeats.count(key) for key in ("new", "new")] == [1, 0]
    for key in range(1, 1000):
        repeats.count(key)
    assert repeats.count("beyond") == 3
