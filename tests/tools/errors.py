"""The one error of the tools: a real part that could not be had, and why."""

from __future__ import annotations


class MissingToolError(Exception):
    """A real part is not there; the message says why and what would help."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
