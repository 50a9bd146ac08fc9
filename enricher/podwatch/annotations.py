"""Which annotations are read of a pod. Pure.

The others are stepped over where they stand: they can be long, up to 256 KiB for all of a pod's.
"""

from collections.abc import Iterable
from sys import intern
from typing import Final, cast

import msgspec

from enricher.podwatch.objects import Annotations

_FIXED: Final = {field.encode_name: field.name for field in msgspec.structs.fields(Annotations)}


class ChosenAnnotations:
    """The annotations that the settings ask for, as a struct to decode and as a dictionary."""

    def __init__(self, names: Iterable[str]) -> None:
        wanted = dict.fromkeys(names)
        self._attributes = {
            intern(name): _FIXED.get(name, f"chosen_{number}") for number, name in enumerate(wanted)
        }
        self.struct = _struct(
            {name: attribute for name, attribute in self._attributes.items() if name not in _FIXED}
        )

    def of(self, annotations: Annotations) -> dict[str, str]:
        """Return those that a pod has."""
        found: dict[str, str] = {}
        for name, attribute in self._attributes.items():
            value = getattr(annotations, attribute)
            if value is not None:
                found[name] = value
        return found


def _struct(attributes: dict[str, str]) -> type[Annotations]:
    """Make the struct that has a field for each name, besides those that are always read."""
    made = msgspec.defstruct(
        "ChosenAnnotations",
        [
            (attribute, str | None, msgspec.field(default=None, name=name))
            for name, attribute in attributes.items()
        ],
        bases=(Annotations,),
        gc=False,
    )
    return cast("type[Annotations]", made)
