"""Questions to one device, a GPU or a MIG instance: what it does not support is asked once.

Here lives what is remembered of a device's refusals. Which questions there are lives elsewhere.
"""

from dataclasses import dataclass, field
from typing import Any

from agent.nvml.calls import UnsupportedError, call_nvml, none_where_absent

Call = tuple[Any, ...]
"""A function's name and the arguments behind the handle that never change."""


@dataclass(kw_only=True)
class Asker:
    """Asks one device of an open library."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    _refused: dict[Call, str] = field(default_factory=dict)

    def ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # as the library has it
        """Give the answer, or `None` where there is none; raises NvmlLostError."""
        return none_where_absent(lambda: self.insist((name, *arguments)))

    def insist(self, call: Call, *more: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
        """Give the answer; `more` arguments change from call to call.

        Raises UnsupportedError where it is known to be unsupported, FailedError and NvmlLostError.
        """
        if call in self._refused:
            raise UnsupportedError(self._refused[call])
        name, *arguments = call
        try:
            return call_nvml(self.library, name, self.handle, *arguments, *more, empty=empty)
        except UnsupportedError as error:
            self._refused[call] = str(error)
            raise
