"""Divides whole numbers so that the parts sum to the whole: what books in whole numbers stand on.

Each part is its exact share, rounded up or down. The units that are left once all shares are
rounded down go to those that lost most by it, one each (the largest remainder); where two lost the
same, to the one that comes first. Whoever divides therefore puts the weights into an order that
follows from what they are of, never into that in which they came. Nothing here is a float, but the
ratio of which `parts_per_million` makes a whole number.

Compiled, numbers are C's of 128 bits where all products fit into these, else Python's, by the same
function (`division.pxd`, ADR 019). Who divides in a hot place has the weights in objects whose
fields are C's (`Portion`), so that no number is boxed between a weight and its part.
"""

from collections.abc import Sequence
from typing import Final

PPM: Final = 1_000_000
"""Parts of the whole in which ratios are counted: readings have six digits."""
MAX_PRODUCT: Final = 1e37
"""Less than 128 bits hold, with room for the rounding by which products are compared with it."""
_MAX_TOTAL: Final = 2**62
# Up to so many units that are left, looking for who lost most costs less than sorting all.
_FEW: Final = 8


class Portion:
    """Who has a part of a whole, for `share_out`."""

    __slots__ = ("part", "weight")

    def __init__(self) -> None:
        self.weight = 0
        """By what the whole is divided: less than 63 bits."""
        self.part = 0
        """What it has of the whole last divided."""


def parts_per_million(ratio: float) -> int:
    """Return a ratio as the whole number with which everything is computed."""
    return round(ratio * 1_000_000)


def part_of(total: int, numerator: int, denominator: int) -> int:
    """Return total x numerator / denominator to the nearest whole number, halves rounded up."""
    amount, size, scale = total, numerator, denominator
    # One more of each: what is multiplied by zero has to fit as well.
    if (size + 1) * (amount + 1) < MAX_PRODUCT and scale < MAX_PRODUCT and amount < _MAX_TOTAL:
        small_total, small_numerator, small_denominator = total, numerator, denominator
        return nearest(small_total, small_numerator, small_denominator)
    return nearest(total, numerator, denominator)


def nearest(total: int, numerator: int, denominator: int) -> int:
    """Return what `part_of` does, of numbers whose products fit into their own type."""
    return (2 * numerator * total + denominator) // (2 * denominator)


def divide(total: int, weights: Sequence[int], numerator: int, denominator: int) -> list[int]:
    """Return a part for each weight: weight x numerator / denominator, rounded up or down.

    They sum to `total`, which is what all weights together have, rounded up or down itself.
    """
    if len(weights) == 1:
        return [total]
    # Compared as C's floating-point numbers, which costs next to nothing.
    size, scale = numerator, denominator
    largest = 0
    for weight in weights:
        if weight > largest:  # noqa: PLR1730 - max() costs three times as much
            largest = weight
    if (size + 1) * (largest + 1) < MAX_PRODUCT and scale < MAX_PRODUCT and total < _MAX_TOTAL:
        small_total, small_numerator, small_denominator = total, numerator, denominator
        return _divide(small_total, weights, small_numerator, small_denominator)
    return _divide(total, weights, numerator, denominator)


def _divide(total: int, weights: Sequence[int], numerator: int, denominator: int) -> list[int]:
    left = total
    first, max_lost = 0, 0
    parts = []
    for index, weight in enumerate(weights):
        exact = numerator * weight
        part = exact // denominator
        lost = exact - part * denominator
        left -= part
        parts.append(part)
        if lost > max_lost:
            first, max_lost = index, lost
    if left == 1:
        parts[first] += 1
    elif left:
        remainders = [numerator * weight % denominator for weight in weights]
        # Sorting is stable, backwards too: of equal remainders the first one comes first.
        by_remainder = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
        for index in by_remainder[:left]:
            parts[index] += 1
    return parts


def share_out(total: int, shares: Sequence[Portion], numerator: int, denominator: int) -> None:
    """Set the part of each, as `divide` does, of numbers whose products fit into their own type."""
    left = total
    for share in shares:
        part = numerator * share.weight // denominator
        share.part = part
        left -= part
    if left > _FEW:
        remainders = [numerator * share.weight % denominator for share in shares]
        by_remainder = sorted(range(len(shares)), key=remainders.__getitem__, reverse=True)
        for index in by_remainder[:left]:
            shares[index].part += 1
        return
    while left > 0:
        first, max_lost = shares[0], 0
        for share in shares:
            # Below zero once it has been given a unit.
            lost = numerator * share.weight - denominator * share.part
            if lost > max_lost:
                first, max_lost = share, lost
        first.part += 1
        left -= 1
