"""How fast what has waited is sent: faster than it was made, but not as fast as it can be.

Pure: it says how long to wait, it does not wait.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_LONGEST_GAP_MS: Final = 60_000  # the longest tick; a longer gap is no ticks to be spread


def pause_seconds(times_ms: Sequence[int], *, factor: float, chance: float) -> float:
    """Return how long to wait after sending what was made at `times_ms`, in their order.

    At least their time divided by `factor`; at most twice that, by `chance` (0 to 1).
    """
    if len(times_ms) < 2:  # noqa: PLR2004  # a single one was not kept waiting by another
        return 0.0
    gaps_ms = [min(max(0, after - before), _LONGEST_GAP_MS) for before, after in pairwise(times_ms)]
    made_seconds = sum(gaps_ms) / len(gaps_ms) * len(times_ms) / 1000
    return made_seconds / factor * (1 + chance)
