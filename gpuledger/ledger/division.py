"""Divides whole numbers so that the parts sum to the whole: what books in whole numbers stand on.

Each part is its exact share, rounded up or down. The units that are left once all shares are
rounded down go to those that lost most by it, one each (the largest remainder); where two lost the
same, to the one that comes first. Whoever divides therefore puts the weights into an order that
follows from what they are of, never into that in which they came. Nothing here is a float, but the
ratio of which `parts_per_million` makes a whole number.

Compiled, numbers are C's of 128 bits where all products fit into these, else Python's, by the same
function (`division.pxd`, ADR 019).
"""

from collections.abc import Sequence
from typing import Final

PPM: Final = 1_000_000
"""Parts of the whole in which ratios are counted: readings have six digits."""
# Half of what 128 bits hold, as remainders are added to products.
_MAX_SMALL: Final = 2**126


def parts_per_million(ratio: float) -> int:
    """Return a ratio as the whole number with which everything is computed."""
    return round(ratio * 1_000_000)


def part_of(total: int, numerator: int, denominator: int) -> int:
    """Return total x numerator / denominator to the nearest whole number, halves rounded up."""
    return (2 * total * numerator + denominator) // (2 * denominator)


def divide(total: int, weights: Sequence[int], numerator: int, denominator: int) -> list[int]:
    """Return a part for each weight: weight x numerator / denominator, rounded up or down.

    They sum to `total`, which is what all weights together have, rounded up or down itself.
    """
    if len(weights) == 1:
        return [total]
    if numerator * max(weights) < _MAX_SMALL and denominator < _MAX_SMALL:
        small_numerator, small_denominator = numerator, denominator
        return _divide(small_numerator, small_denominator, total, weights)
    return _divide(numerator, denominator, total, weights)


def _divide(numerator: int, denominator: int, total: int, weights: Sequence[int]) -> list[int]:
    left = total
    parts = []
    remainders = []
    for weight in weights:
        exact = numerator * weight
        part = exact // denominator
        left -= part
        parts.append(part)
        remainders.append(exact - part * denominator)
    if left:
        # Sorting is stable, backwards too: of equal remainders the first one comes first.
        by_remainder = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
        for index in by_remainder[:left]:
            parts[index] += 1
    return parts
