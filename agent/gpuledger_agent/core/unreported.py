"""What is queried rarely, of answers of which no tick was made: the next tick has it.

So the first answers, which only open the first interval, do not cost a node's health for as long as
it takes until that is asked again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from gpuledger_agent.core.raw import RawGpuSample

_RARE: Final = ("readings", "health")
"""Fields of `RawGpuSample` that are not queried for each tick. The chip's counters are as rare: of
them the first query only begins a time, and later ones are of the time that they bear."""


class UnreportedReadings:
    """The rare readings of the latest answers, as long as no tick has had them."""

    def __init__(self) -> None:
        self._kept: Mapping[str, Mapping[str, Any]] = {}

    def add_to(self, raw: Sequence[RawGpuSample], *, is_reported: bool) -> Sequence[RawGpuSample]:
        """Return the answers with what was kept; keep theirs where they will not be reported."""
        kept, self._kept = self._kept, {}
        if not is_reported:
            self._kept = {
                gpu.uuid: {name: values for name in _RARE if (values := getattr(gpu, name))}
                for gpu in raw
            }
        if not kept:
            return raw
        return [
            replace(
                gpu,
                **{
                    name: values
                    for name, values in kept.get(gpu.uuid, {}).items()
                    if not getattr(gpu, name)
                },
            )
            for gpu in raw
        ]
