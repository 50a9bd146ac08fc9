"""What tests check of an error beside its type, for `pytest.raises(…, check=…)`.

A message's sentence may be worded anew, its names may not go: they are what a user acts on. What a
message says in full is held by tables of messages (`tests/unit/cli/test_messages_to_users.py`).
"""

from collections.abc import Callable


def has_errno(number: int) -> Callable[[OSError], bool]:
    """Return a check that an error of the operating system has this number."""
    return lambda error: error.errno == number


def has_words(*words: str) -> Callable[[BaseException], bool]:
    """Return a check that a message has these: names of settings, files and topics, numbers."""
    return lambda error: all(word in str(error) for word in words)
