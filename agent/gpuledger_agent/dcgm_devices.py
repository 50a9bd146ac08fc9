"""The devices that DCGM's metrics show, in the notation of dcgm-exporter's `--devices`."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_ALL: Final = range(2**31)
_RANGE: Final = r"\d{1,5}(-\d{1,5})?"
_DEVICES: Final = re.compile(rf"f|i|(i\+)?g(:(?P<gpus>{_RANGE}(,{_RANGE})*))?(\+i)?", re.ASCII)


class DcgmDevices(NamedTuple):
    """The GPUs and MIG instances to show."""

    gpus: Sequence[range]
    """Ranges that contain the indices of the GPUs to show."""
    has_instances: bool
    """Whether MIG instances are shown."""

    def shows(self, index: int, *, is_instance: bool) -> bool:
        """Return whether to show the GPU with this index, or a MIG instance of that GPU."""
        return self.has_instances if is_instance else any(index in one for one in self.gpus)


def parse_devices(text: str) -> DcgmDevices:
    """Return the devices that dcgm-exporter shows for `text`; raise `ValueError` if it is invalid.

    `f` and `g+i` mean all devices. `g` means all GPUs, `g:0,2-3` the GPUs with these indices, and
    `i` all MIG instances. MIG instances cannot be selected by number.
    """
    found = _DEVICES.fullmatch(text)
    if found is None:
        raise ValueError(f"expected f, g, i, g+i or GPUs such as g:0,2-3, got {text!r}")
    if found["gpus"]:
        gpus = [_parse_range(one) for one in found["gpus"].split(",")]
    else:
        gpus = [] if text == "i" else [_ALL]
    return DcgmDevices(gpus, has_instances="f" in text or "i" in text)


def _parse_range(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last if dash else first) + 1)
