"""The energy of each GPU in a tick: idle draw and active draw apart, and whose each is.

Pure arithmetic. A GPU without work draws its idle draw; what it draws beyond that, those who work
cause. The table of idle draws is the one thing here that is not in the tick.
"""

from functools import lru_cache
from typing import Final

from gpuledger.records import GpuReading

# Board watts without a process and without a kernel, as nvidia-smi showed them on machines whose
# listings are public: the low end, as a floor too high would take from idle what work drew.
_IDLE_WATTS: Final = {
    "B200": 136.0,
    "H200": 76.0,
    "H200 NVL": 69.0,
    "H100 80GB HBM3": 71.0,
    "H100 PCIe": 50.0,
    "H20": 74.0,
    "A100-SXM4-80GB": 45.0,
    "A100-SXM4-40GB": 42.0,
    "A100 80GB PCIe": 44.0,
    "A40": 21.0,
    "A30": 28.0,
    "A10": 17.0,
    "L40S": 22.0,
    "L4": 15.0,
    "T4": 9.0,
    "V100-SXM2": 38.0,
}
LISTED_PRODUCTS: Final = len(_IDLE_WATTS)
_BRANDS: Final = ("NVIDIA ", "Tesla ")
# Less than any driver can tell apart from nothing, and enough to divide by.
_MIN_RATIO: Final = 1e-9


# The energy of one row of a tick in joules: what is split by busy time; how much of that the device
# would have drawn idle, which is all of it where nobody knows; and beside it what is idle's anyway.
Drawn = tuple[float, float, float]
# The same, split: watts of those that were busy, joules of nobody, joules of idle.
JoulesSplit = tuple[float, float, float]


@lru_cache(maxsize=256)
def idle_watts(model: str | None) -> float | None:
    """Return the idle draw of a product; `None` where it is not known."""
    name = model or ""
    for brand in _BRANDS:
        name = name.removeprefix(brand)
    known = [
        each for each in _IDLE_WATTS if name == each or name.startswith((f"{each} ", f"{each}-"))
    ]
    return _IDLE_WATTS[max(known, key=len)] if known else None


def energy_of(reading: GpuReading, seconds: float) -> Drawn | None:
    """Return what a board drew; `None` where it tells neither energy nor power."""
    if reading.energy_joules is not None:
        joules = reading.energy_joules
    elif reading.power_watts is not None:
        joules = reading.power_watts * seconds
    else:
        return None
    floor_watts = idle_watts(reading.model)
    if floor_watts is None or floor_watts * seconds > joules:
        return joules, joules, 0.0
    return joules, floor_watts * seconds, 0.0


def split_joules(drawn: Drawn | None, worked: float | None, seconds: float) -> JoulesSplit | None:
    """Split the energy; `None` where it is not known.

    The floor goes by time, idle time included; what was drawn above it goes to those that were
    busy, `worked` seconds in sum, in proportion. Where nobody was, all is idle's; where that is not
    known, all is nobody's.
    """
    if drawn is None:
        return None
    joules, floor, of_idle = drawn
    if worked is None:
        return 0.0, joules, of_idle
    if worked <= _MIN_RATIO * seconds:
        return 0.0, 0.0, joules + of_idle
    floor_watts = floor / seconds
    watts = floor_watts + (joules - floor) / worked
    return watts, 0.0, (seconds - worked) * floor_watts + of_idle
