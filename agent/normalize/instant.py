"""What a tick drew: the difference of the energy counter, where it can be true. Pure."""

from typing import Final

from agent.core.raw import RawGpuSample
from agent.normalize.validation import Validator
from gpuledger.records import bounds

_MILLI: Final = 1000


def energy_delta_joules(
    before_mj: int | None, answers: RawGpuSample, interval_ns: int, sieve: Validator
) -> float | None:
    """Return the counter's difference; a counter that fell has started again and says nothing."""
    now_mj = answers.energy_millijoules
    if before_mj is None or now_mj is None or now_mj < before_mj:
        return None
    by_power_mj = bounds.MAX_WATTS * _MILLI * interval_ns // 1_000_000_000
    max_mj = min(by_power_mj, bounds.MAX_TICK_JOULES * _MILLI)
    drawn_mj = sieve.keep(now_mj - before_mj, (0, max_mj), reading="energy_joules")
    return None if drawn_mj is None else drawn_mj / _MILLI
