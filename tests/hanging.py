"""How long a test waits for what only a mistake keeps from happening."""

from typing import Final

HANG_SECONDS: Final = 120.0
"""Ends a test that hangs, so long that a busy machine does not end it; it states no law of time."""
