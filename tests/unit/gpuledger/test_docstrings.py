"""The docstring under a field is found, even if the class inherits the field."""

import dataclasses

from gpuledger.codegen import class_docstring, field_docstrings


@dataclasses.dataclass
class Base:
    """A base."""

    first: int = 0
    """The first
    of two lines."""
    silent: int = 0
    second: int = 0
    """The base's second."""


@dataclasses.dataclass
class Derived(Base):
    second: int = 0
    """The second, overridden."""


def test_each_field_has_the_docstring_under_it_as_one_line() -> None:
    assert field_docstrings(Base) == {
        "first": "The first of two lines.",
        "second": "The base's second.",
    }


def test_a_derived_class_keeps_the_docstrings_of_its_base_unless_it_overrides_them() -> None:
    assert field_docstrings(Derived) == {
        "first": "The first of two lines.",
        "second": "The second, overridden.",
    }


def test_a_class_without_source_has_no_field_docstrings() -> None:
    assert field_docstrings(type("Made", (), {})) == {}


def test_a_class_docstring_is_one_line_and_empty_if_there_is_none() -> None:
    assert (class_docstring(Base), class_docstring(type("Made", (), {}))) == ("A base.", "")
