"""Members of the binding's structs, read the short way."""

from typing import Any, Final

peek: Final[Any] = object.__getattribute__
"""`getattr` for members that are no text.

The binding's own attribute access decodes text, and for a number costs more than the call of the
driver that it came from.
"""
