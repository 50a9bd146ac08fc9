"""A fixed bound of the product, and a section of the page with the same effect."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Limit:
    """A bound of the product."""

    item: str
    """The limited thing, for users."""
    module: ModuleType
    name: str
    """The constant in the module; the end of its name is its unit."""
    above: str = ""
    """The effect above it, if the section does not name it."""


@dataclass(frozen=True)
class Section:
    """Limits with the same effect."""

    title: str
    effect: str
    """The effect above the limits; empty if each limit names its own."""
    limits: Sequence[Limit]
