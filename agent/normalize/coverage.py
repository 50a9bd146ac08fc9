"""Which stretch of the driver's time a tick covers, by the GPU's samples. Pure.

How the two clocks are held together is decided in `timeline`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.core.raw import RawGpuSample, SampleCursor, UtilizationSample
from agent.normalize import validation
from agent.normalize.driver_clock import (
    USUAL_WINDOW_US,
    DriverClock,
    Interval,
    SampledWindow,
    advance,
    cut_windows,
    learn_window_us,
    mean_percent,
)
from agent.normalize.validation import Validator


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The part of the driver's time that the tick covers, and the windows that tell of it."""

    time: DriverClock | None
    """The driver's clock; `None` where no sample has shown it."""
    stretch: Interval | None
    """What is covered; `None` where there is no sample."""
    gpu: list[SampledWindow]
    """The GPU's windows since those seen before, oldest first."""
    memory: list[SampledWindow]
    """The memory controller's."""
    window_us: float | None
    """The usual length of the GPU's windows, as far as it has shown."""

    @classmethod
    def find(
        cls,
        answers: RawGpuSample,
        *,
        time: DriverClock | None,
        seen: SampleCursor,
        known_us: float | None,
        interval_ns: int,
        sieve: Validator,
    ) -> "Coverage":
        """Find it; clock, newest samples and length of a window are those of the tick before."""
        gpu = _plausible(answers.samples, "utilization_ratio", sieve)
        memory = _plausible(answers.memory_samples, "memory_utilization_ratio", sieve)
        window_us = learn_window_us(gpu, before_us=seen.gpu_us, known_us=known_us)
        stretch = None
        if gpu or memory:
            time, stretch = advance(
                time,
                newest_us=_newest_us(gpu or memory),
                window_us=window_us or USUAL_WINDOW_US,
                interval_us=interval_ns / 1000,
            )
        return cls(
            time=time,
            stretch=stretch,
            gpu=cut_windows(gpu, before_us=seen.gpu_us, window_us=window_us),
            memory=cut_windows(memory, before_us=seen.memory_us, window_us=window_us),
            window_us=window_us,
        )

    def mean(
        self,
        windows: Sequence[SampledWindow],
        latest_percent: int | None,
        reading: str,
        sieve: Validator,
    ) -> float | None:
        """Return the mean over the cover, or the latest window where nothing new is covered."""
        percent = mean_percent(windows, self.stretch) if self.stretch else None
        if percent is None and windows:
            percent = windows[-1].percent
        if percent is None:
            percent = sieve.keep(latest_percent, validation.PERCENT, reading=reading)
        # The mean of hundreds may be a hair more, in floating point.
        return None if percent is None else min(1.0, percent / 100)


def _plausible(
    samples: Sequence[UtilizationSample] | None, reading: str, sieve: Validator
) -> list[UtilizationSample]:
    return [
        sample
        for sample in samples or ()
        if sieve.keep(sample.percent, validation.PERCENT, reading=reading) is not None
        and sieve.keep(sample.timestamp_us, validation.TIMESTAMP_US, reading=reading) is not None
    ]


def _newest_us(samples: Sequence[UtilizationSample]) -> int:
    return max(sample.timestamp_us for sample in samples)
