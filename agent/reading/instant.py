"""The readings of an instant, each in base units and only where it can be true. Pure."""

from typing import Any, Final

from agent.nvml.answers import GpuAnswers
from agent.reading import plausibility
from agent.reading.plausibility import Sieve

_HERTZ_PER_MEGAHERTZ: Final = 1_000_000
_MILLI: Final = 1000


def read_instant(answers: GpuAnswers, sieve: Sieve) -> dict[str, Any]:
    """Give the readings of the instant, each where it can be true."""
    total_bytes = sieve.keep(
        answers.memory_total_bytes, plausibility.MEMORY_BYTES, reading="memory_total"
    )
    memory = (0, plausibility.MEMORY_BYTES[1] if total_bytes is None else total_bytes)
    power_mw = sieve.keep(answers.power_milliwatts, plausibility.POWER_MILLIWATTS, reading="power")
    energy_mj = sieve.keep(
        answers.energy_millijoules, plausibility.ENERGY_MILLIJOULES, reading="energy_total"
    )
    return {
        "memory_total_bytes": total_bytes,
        "memory_used_bytes": sieve.keep(answers.memory_used_bytes, memory, reading="memory_used"),
        "memory_reserved_bytes": sieve.keep(
            answers.memory_reserved_bytes, memory, reading="memory_reserved"
        ),
        "power_watts": _scaled(power_mw),
        "energy_total_joules": _scaled(energy_mj),
        "temperature_celsius": sieve.keep(
            answers.temperature_celsius, plausibility.TEMPERATURE_CELSIUS, reading="temperature"
        ),
        "sm_clock_hertz": _hertz(answers.sm_clock_megahertz, "sm_clock", sieve),
        "memory_clock_hertz": _hertz(answers.memory_clock_megahertz, "memory_clock", sieve),
    }


def drawn_joules(
    before_mj: int | None, answers: GpuAnswers, interval_ns: int, sieve: Sieve
) -> float | None:
    """Give the counter's difference; a counter that fell has started again and says nothing."""
    now_mj = answers.energy_millijoules
    if before_mj is None or now_mj is None or now_mj < before_mj:
        return None
    most_mj = plausibility.POWER_MILLIWATTS[1] * interval_ns // 1_000_000_000
    return _scaled(sieve.keep(now_mj - before_mj, (0, most_mj), reading="energy"))


def _scaled(milli: int | None) -> float | None:
    return None if milli is None else milli / _MILLI


def _hertz(megahertz: int | None, reading: str, sieve: Sieve) -> int | None:
    kept = sieve.keep(megahertz, plausibility.CLOCK_MEGAHERTZ, reading=reading)
    return None if kept is None else kept * _HERTZ_PER_MEGAHERTZ
