"""The law of a fault: each second of a node is in the store once, or a gap names it."""

import pytest

from gpuledger.clock import NS_PER_SECOND
from tests.chaos.stored_time import StoredSample, judge_time


def samples(*seconds: tuple[float, float, float, int]) -> list[StoredSample]:
    """Return samples of one node: start, end, named gap and copies."""
    return [
        StoredSample(
            "n",
            round(start * NS_PER_SECOND),
            round(end * NS_PER_SECOND),
            round(gap * NS_PER_SECOND),
            copies,
        )
        for start, end, gap, copies in seconds
    ]


@pytest.mark.parametrize(
    ("stored", "gaps", "lost", "repeated", "named"),
    [
        pytest.param([(0, 1, 0, 1), (1, 2, 0, 1)], [], 0, 0, 0, id="all"),
        pytest.param([(0, 1, 0, 1), (1.00001, 2, 0, 1)], [], 0, 0, 0, id="inaccurate times"),
        pytest.param([(0, 1, 0, 1), (3, 4, 0, 1)], [], 2, 0, 0, id="lost"),
        pytest.param([(0, 1, 0, 1), (3, 4, 2, 1)], [], 0, 0, 2, id="named by the sample"),
        pytest.param([(0, 1, 0, 1), (3, 4, 0, 1)], [(0, 4)], 0, 0, 2, id="named by a row"),
        pytest.param([(0, 1, 0, 1), (3, 4, 0, 1)], [(0, 2)], 1, 0, 1, id="named in part"),
        pytest.param([(0, 1, 0, 1), (3, 4, 0, 1)], [(5, 9)], 2, 0, 0, id="another gap"),
        pytest.param([(0, 1, 0, 1), (1, 2, 0, 2)], [], 0, 1, 0, id="stored twice"),
        pytest.param([(0, 1, 0, 1), (0.5, 1.5, 0, 1)], [], 0, 0.5, 0, id="overlapping"),
        pytest.param([(0, 4, 0, 1), (1, 2, 0, 1)], [], 0, 1, 0, id="within another"),
    ],
)
def test_time_is_there_once_or_named_or_lost(
    stored: list[tuple[float, float, float, int]],
    gaps: list[tuple[float, float]],
    *,
    lost: float,
    repeated: float,
    named: float,
) -> None:
    found = judge_time(
        samples(*stored),
        [(round(start * NS_PER_SECOND), round(end * NS_PER_SECOND)) for start, end in gaps],
    )
    judged = (found.lost_seconds, found.repeated_seconds, found.named_seconds)
    assert judged == (lost, repeated, named)


def test_each_node_has_its_own_time() -> None:
    one = samples((0, 1, 0, 1), (1, 2, 0, 1))
    other = [sample._replace(node="m", start_ns=sample.start_ns + 9) for sample in one]
    assert judge_time([*one, *other]).as_line().startswith("lost 0.0 s, duplicated 0.0 s")
