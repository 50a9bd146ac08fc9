"""The memory that something holds, counted in objects."""

import gc
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final

_CODE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)
_NOISE: Final = 1.1
"""Tolerance in objects: small numbers and names are shared."""


def count_held(root: object) -> int:
    """Return how many objects can be reached from this one, without code."""
    seen, waiting = dict[int, object](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, _CODE):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return len(seen)


def is_bounded(holder: object, feed: Callable[[int], object], *, times: int) -> bool:
    """Call `feed` `times` times, and `times` more; return whether the holder did not grow."""
    for number in range(times):
        feed(number)
    before = count_held(holder)
    for number in range(times, 2 * times):
        feed(number)
    return count_held(holder) <= _NOISE * before
