"""Properties of the driver that a GPU's answers reveal.

- `one_sample_each`: the driver returns one sample per process for the whole time since the last
  query, not one per window. Two samples of one process in an answer disprove this. Windows in which
  the GPU was used, but no process has a sample, confirm it.
- `one_process_each`: each of the driver's windows has a sample of only one process, the one that
  ran at one instant. Samples of two processes in a window disprove this. Consecutive windows of
  different processes confirm it, if the former process has not ended.
- `skips_idle`: the driver returns no sample for idle windows. The utilization rates reveal this,
  because they always describe the latest window.
- `loses_windows`: the driver returns no samples of some used windows. Samples of processes in such
  windows reveal this. The mean of the other windows then applies to all.
- `loses_uses`: the driver returns no process samples of some used windows, or samples of other
  windows than the GPU's. The sums of the samples in many windows reveal this.
- `has_right_uses`: in windows in which each process has a sample, the samples add up to the GPU's
  use. If the driver `loses_uses`, the only process without a sample in a window then gets the rest.
"""

from collections.abc import Sequence
from typing import Final

from gpuledger_agent.core.normalize.shares import Shares, UsedWindows
from gpuledger_agent.core.raw import ProcessUtilizationSample, UtilizationSample

_WINDOWS_TO_LEARN: Final = 5
"""Number of windows in which the GPU was used but no process has a sample, so that
`one_sample_each` is confirmed. One such window is not enough, because drivers return no sample for
the window in which a process ends."""
_SWITCHES_TO_LEARN: Final = 20
"""Number of consecutive windows with different processes, so that `one_process_each` is confirmed.
"""
_LOST_TO_LEARN: Final = 3
"""Number of windows with a process's sample but without the GPU's, so that `loses_windows` is
confirmed."""
_MAX_LOST_RATIO: Final = 0.01
"""Part of the windows with process samples up to which the driver counts as losing none."""
_USED_TO_LEARN: Final = 20
"""Number of windows in which a GPU was used that `loses_uses` is judged by. It is confirmed before
that many if the windows that are still to come cannot change the result."""
_MAX_SHORT_RATIO: Final = 0.2
"""Part of these windows in which process samples may fall short of the GPU's use, because the
driver has no sample of the window in which a process ends."""
_FULL_TO_LEARN: Final = 5
"""Number of used windows in which each process has a sample that `has_right_uses` is judged by."""
_WINDOWS_KEPT: Final = 1000
"""Number of these windows after which older ones count half."""
_USED_PERCENT: Final = 5
"""Utilization up to which the shares of several processes may each round to zero."""


class DriverTraits:
    """The properties of the driver that one GPU's answers have revealed so far."""

    def __init__(self) -> None:
        self.one_sample_each: bool | None = None
        """`None` until it is known."""
        self.one_process_each: bool | None = None
        """`None` until it is known."""
        self.skips_idle = False
        self._missing = 0
        """Number of used windows without a process's sample."""
        self._sampled = self._lost = 0
        self._used = UsedWindows()
        self._switches = 0

    def learn_form(
        self,
        uses: Sequence[ProcessUtilizationSample],
        samples: Sequence[UtilizationSample],
        *,
        width_us: int,
    ) -> bool:
        """Learn `one_sample_each` from one answer.

        `uses` are its samples of processes, and `samples` those of the GPU, in windows of
        `width_us`. Return whether there are used windows without a process's sample while the form
        is unknown.
        """
        if len({use.pid for use in uses}) < len(uses):
            self.one_sample_each = False
        if not uses or self.one_sample_each is not None:
            return False
        stamps = {use.timestamp_us for use in uses}
        missing = sum(
            sample.percent > _USED_PERCENT
            and not any(abs(sample.timestamp_us - stamp) < width_us / 2 for stamp in stamps)
            for sample in samples
        )
        self._missing += missing
        if self._missing >= _WINDOWS_TO_LEARN:
            self.one_sample_each = True
            if any(use.sm_percent for use in uses):
                # Frequent polls will show the other windows.
                self._used = UsedWindows()
        return bool(missing)

    def learn(self, shares: Shares, *, is_shared: bool) -> None:
        """Learn the other properties from the samples of a tick, which only disprove `skips_idle`.

        `is_shared` tells whether several containers, or a container and the host, use the GPU.
        """
        self._sampled += shares.sampled_windows
        self._lost += shares.lost_windows
        if self._sampled > _WINDOWS_KEPT:
            self._sampled //= 2
            self._lost //= 2
        if self.loses_windows:
            # The windows that were missing were not idle.
            self.skips_idle = False
        if shares.mixed_windows:
            self.one_process_each = False
        elif self.one_process_each is None and not self.one_sample_each and is_shared:
            self._switches += shares.switches
            self.one_process_each = True if self._switches >= _SWITCHES_TO_LEARN else None
        if not self.one_sample_each or is_shared:
            self._used = self._used.plus(shares.used_windows)
            if self._used.used > _WINDOWS_KEPT:
                self._used = self._used.halved()

    @property
    def loses_windows(self) -> bool:
        """Whether the driver returns no samples of some windows in which the GPU was used."""
        return self._lost >= _LOST_TO_LEARN and self._lost > _MAX_LOST_RATIO * self._sampled

    @property
    def loses_uses(self) -> bool:
        """Whether the driver returns no samples of some windows in which a process ran."""
        return self._used.short > _MAX_SHORT_RATIO * max(self._used.used, _USED_TO_LEARN)

    @property
    def has_right_uses(self) -> bool:
        """Whether the processes' samples add up to the GPU's use if each process has one."""
        full = self._used.full
        return full >= _FULL_TO_LEARN and self._used.short_full <= _MAX_SHORT_RATIO * full
