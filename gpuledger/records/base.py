"""How a record is made: frozen, keyword-only, and without a key for what is not known.

Here live the decorator of all records and their whole numbers. No record itself, no encoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, cast, dataclass_transform

import msgspec

T = TypeVar("T")

# What does not fit in 64 bits decodes, but could never be encoded again; and a position of -1
# would be the last one in Python.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# What the store keeps in 32 bits.
SmallNatural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen keyword-only dataclass whose `None` fields are absent on the wire.

    orjson writes what stands in an instance's `__dict__`, so an optional field that was not given
    is taken out of it; reading the attribute still finds `None`, the default on the class.
    Without slots, because orjson is 3 to 5 times slower on slotted dataclasses.
    """
    made = dataclass(frozen=True, kw_only=True)(cls)
    optional = tuple(field.name for field in fields(cast("Any", made)) if field.default is None)
    if optional:
        fill = made.__init__
        made.__init__ = _leave_out_absent(fill, optional)  # type: ignore[method-assign]  # meant so
    return made


def _leave_out_absent(fill: Callable[..., None], optional: tuple[str, ...]) -> Callable[..., None]:
    def __init__(self: Any, **values: Any) -> None:  # noqa: ANN401, N807  # stands in for any generated constructor
        fill(self, **values)
        present = self.__dict__
        for name in optional:
            if present[name] is None:
                del present[name]

    return __init__
