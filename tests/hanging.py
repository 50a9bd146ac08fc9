"""A timeout for waits that only a bug can keep from ending."""

from typing import Final

HANG_SECONDS: Final = 120.0
"""Ends a test that hangs; long enough for a busy machine. It does not state a time limit."""
