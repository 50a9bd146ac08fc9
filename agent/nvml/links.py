"""How many NVLinks a GPU has: asked until it is known, and then no more.

Here lives the number alone. What is asked of a link, and which links refuse it, lives elsewhere.
"""

from typing import Final

import pynvml

from agent.nvml.device import DeviceClient
from agent.nvml.fields import FieldBatch
from agent.nvml.metric_specs import FieldValue

_COUNT: Final = FieldValue(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


class Links:
    """The NVLinks of one GPU; their numbers begin at 0."""

    def __init__(self, asker: DeviceClient) -> None:
        self._asker = asker
        self._batch = FieldBatch(asker, [("count", _COUNT)])
        self._is_known = False
        self.numbers = range(0)
        """Those that it has, as far as is known."""

    def look(self) -> bool:
        """Ask where it is not known; tells whether they are others now. Raises NvmlLostError."""
        is_asked = _COUNT.key in self._asker.outcomes
        if is_asked and (self._is_known or self._asker.is_refused(_COUNT.key)):
            return False
        # Not as other fields are: a whole call that is refused would refuse all of them.
        count, before = self._batch.ask_apart().get("count"), self.numbers
        if isinstance(count, int) and 0 <= count <= pynvml.NVML_NVLINK_MAX_LINKS:
            self.numbers, self._is_known = range(count), True
        return self.numbers != before
