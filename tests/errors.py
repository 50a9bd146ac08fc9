"""Checks of an error's details for `pytest.raises(…, check=…)`.

A message may be reworded, but its names must stay, because users act on them. Tables of messages
test the full texts (`tests/unit/cli/test_messages_to_users.py`).
"""

from collections.abc import Callable


def has_errno(number: int) -> Callable[[OSError], bool]:
    """Return a check that an operating system error has this number."""
    return lambda error: error.errno == number


def has_words(*words: str) -> Callable[[BaseException], bool]:
    """Return a check that a message contains these names (settings, files, topics) or numbers."""
    return lambda error: all(word in str(error) for word in words)
