"""How a record is made: frozen, keyword-only, and without a key for what is not known.

Here live the decorators of all records, their whole numbers, and the bounds of what identifies a
tick: node, boot and `seq`. Decoding holds every record to them. No record itself, no encoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, TypeVar, cast, dataclass_transform

import msgspec

T = TypeVar("T")
_ARRAYS: Final[set[object]] = set()

# What does not fit in 64 bits decodes, but could never be encoded again; and a position of -1
# would be the last one in Python.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# What the store keeps in 32 bits.
SmallNatural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MAX_SEQ: Final = 10 * 366 * 86_400_000
"""Ten years in milliseconds: longer than any kernel runs."""
# What of a boot is not above the highest `seq` of it counts as repeated, so one that cannot be
# true would cost all ticks of that boot.
Seq = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
MAX_NODE_NAME_LENGTH: Final = 253
# `$` alone would take a newline behind it, in Python though not in JSON Schema.
NODE_NAME_PATTERN: Final = (
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$(?!\n)"
)
"""Kubernetes' rule for the names of nodes: a DNS-1123 subdomain."""
NodeName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=MAX_NODE_NAME_LENGTH, pattern=NODE_NAME_PATTERN),
]
# The kernel's are UUIDs, of 36 characters.
BootId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen keyword-only dataclass, written as an object: no key for what is `None`.

    A field that was not given is in no instance's `__dict__` either; reading it still finds `None`,
    the default on the class.
    """
    made = dataclass(frozen=True, kw_only=True)(cls)
    optional = tuple(field.name for field in fields(cast("Any", made)) if field.default is None)
    if optional:
        fill = made.__init__
        made.__init__ = _leave_out_absent(fill, optional)  # type: ignore[method-assign]  # meant so
    return made


@dataclass_transform(frozen_default=True, kw_only_default=True)
def array_record(cls: type[T]) -> type[T]:
    """Make `cls` a record that is written as an array: each field's value in its place.

    For what comes in tens in each tick, where names would be most of the bytes. What is not known
    is `null`. A new field is put behind the last one; none is ever taken out or moved.
    """
    made = record(cls)
    _ARRAYS.add(made)
    return made


def is_array(cls: object) -> bool:
    """Return whether a record is written as an array."""
    return cls in _ARRAYS


def _leave_out_absent(fill: Callable[..., None], optional: tuple[str, ...]) -> Callable[..., None]:
    def __init__(self: Any, **values: Any) -> None:  # noqa: ANN401, N807  # stands in for any generated constructor
        fill(self, **values)
        present = self.__dict__
        for name in optional:
            if present[name] is None:
                del present[name]

    return __init__
