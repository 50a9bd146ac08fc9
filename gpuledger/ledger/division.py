"""Divides whole numbers so that the parts add up exactly to the whole.

Each part is its exact share, rounded up or down. First all shares are rounded down; the remaining
units then go, one each, to the parts that lost most by rounding (the largest remainder method). If
remainders are equal, the first one gets the unit. Callers must therefore order the weights by
their owners, never by the order in which they arrived. Everything is a whole number except the
ratio that `parts_per_million` converts.

When compiled, each function uses 128-bit C integers if all products fit, otherwise Python's
integers (`division.pxd`, ADR 019). Hot code keeps the weights in objects with C fields (`Portion`),
so that no Python number is created between a weight and its part.
"""

from collections.abc import Sequence
from typing import Final

PPM: Final = 1_000_000
"""Number of parts of a whole in which ratios are expressed, because readings have six decimal
places."""
MAX_PRODUCT: Final = 1e37
"""Maximum of products that are computed in 128 bits. The margin to the limit of 128 bits allows for
the rounding of the products that are compared with this maximum."""
_MAX_TOTAL: Final = 2**62
# Up to this many remaining units, searching for the largest remainder costs less than sorting.
_FEW: Final = 8


class Portion:
    """A weight, and the part that `share_out` sets in proportion to it."""

    __slots__ = ("part", "weight")

    def __init__(self) -> None:
        self.weight = 0
        """The weight of this part: a whole number of less than 63 bits."""
        self.part = 0
        """The part that `share_out` has set last."""


def parts_per_million(ratio: float) -> int:
    """Return a ratio in parts per million, the whole number used in all calculations."""
    return round(ratio * 1_000_000)


def part_of(total: int, numerator: int, denominator: int) -> int:
    """Return total x numerator / denominator to the nearest whole number, halves rounded up."""
    amount, size, scale = total, numerator, denominator
    # One is added to each factor, because a number that is multiplied by zero must also fit.
    if (size + 1) * (amount + 1) < MAX_PRODUCT and scale < MAX_PRODUCT and amount < _MAX_TOTAL:
        small_total, small_numerator, small_denominator = total, numerator, denominator
        return nearest(small_total, small_numerator, small_denominator)
    return nearest(total, numerator, denominator)


def nearest(total: int, numerator: int, denominator: int) -> int:
    """Return the same result as `part_of`.

    When compiled, this function uses 128-bit integers, so all products must fit into 128 bits.
    """
    return (2 * numerator * total + denominator) // (2 * denominator)


def divide(total: int, weights: Sequence[int], numerator: int, denominator: int) -> list[int]:
    """Return a part for each weight: weight x numerator / denominator, rounded up or down.

    The parts add up to `total`, which must be the sum of the unrounded parts, rounded up or down.
    """
    if len(weights) == 1:
        return [total]
    # Compared as C floating-point numbers, which costs next to nothing.
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
        # Sorting is stable even in reverse, so the first of equal remainders stays first.
        by_remainder = sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)
        for index in by_remainder[:left]:
            parts[index] += 1
    return parts


def share_out(total: int, shares: Sequence[Portion], numerator: int, denominator: int) -> None:
    """Set the part of each share to the result of `divide` for its weight.

    When compiled, this function uses 128-bit integers, so all products must fit into 128 bits.
    """
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
            # Negative if the share has already received a unit.
            lost = numerator * share.weight - denominator * share.part
            if lost > max_lost:
                first, max_lost = share, lost
        first.part += 1
        left -= 1
