"""A driver of which a test alters single functions."""
# ruff: noqa: ANN401  # the functions of nvidia-ml-py have no types

from collections import Counter
from collections.abc import Callable
from typing import Any

import pynvml


class Altered:
    """Plays `pynvml` by another object's functions, but for those in `functions`; counts calls."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.functions: dict[str, Callable[..., Any]] = {}
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return self.functions.get(name, own)(*arguments)

        return call

    def refuse(self, name: str, code: int) -> None:
        """Let a function raise an error from now on."""

        def refused(*_: Any) -> Any:
            raise pynvml.NVMLError(code)

        self.functions[name] = refused
