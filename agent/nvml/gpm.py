"""The chip's own counters (GPM, Hopper and newer): what lies between two samples of them.

Two samples are taken in turn into two buffers; the metrics are of the time between. Whether a
value can be true is judged elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

from agent.nvml.asking import Asker, reason_of
from agent.nvml.calls import FailedError, UnsupportedError, call_nvml
from agent.nvml.fields import check_code
from agent.nvml.questions import Metric, Reading

LEAST_NS: Final = 100_000_000
"""NVML's least time between two samples."""
_MOST_NS: Final = 600_000_000_000
_QUERY: Final = "nvmlGpmQueryDeviceSupport"
_SAMPLE: Final = "nvmlGpmSampleGet"
_MIG_SAMPLE: Final = "nvmlGpmMigSampleGet"
_METRICS: Final = "nvmlGpmMetricsGet"


class Gpm:
    """The counters of one GPU, or of one GPU instance of it."""

    def __init__(
        self,
        asker: Asker,
        readings: Sequence[Reading],
        *,
        monotonic_ns: Callable[[], int],
        gpu_instance: int | None = None,
    ) -> None:
        """`asker` asks the GPU itself, also where `gpu_instance` names an instance of it.

        An instance needs an asker of its own, as it refuses metrics that the GPU does not.
        """
        self._asker = asker
        self._readings = readings
        self._monotonic_ns = monotonic_ns
        self._gpu_instance = gpu_instance
        self._buffers: list[Any] = []
        self._taken_ns: int | None = None
        self._struct: Any = None
        self._ids: list[int] = []

    def ask(self) -> dict[str, Any]:
        """Give `profiling`, by our names, and the time that it is of as `profiling_ns`.

        Empty where there is nothing to tell: the GPU has no such counters, or no sample before
        this one, or one that is too old or too young. Raises NvmlLostError.
        """
        now_ns = self._monotonic_ns()
        if self._taken_ns is not None and now_ns - self._taken_ns < LEAST_NS:
            return {}
        try:
            return self._ask(now_ns)
        except (UnsupportedError, FailedError):
            return {}

    def close(self) -> None:
        """Free the buffers; the library must be open."""
        buffers, self._buffers, self._taken_ns = self._buffers, [], None
        for buffer in buffers:
            try:
                call_nvml(self._asker.library, "nvmlGpmSampleFree", buffer)
            except (UnsupportedError, FailedError):
                continue

    def _ask(self, now_ns: int) -> dict[str, Any]:
        self._prepare()
        older, newer = self._buffers
        self._take(newer)
        before_ns, self._taken_ns = self._taken_ns, now_ns
        # The newer one is the older one of the next time, whatever comes of this one.
        self._buffers = [newer, older]
        if before_ns is None or now_ns - before_ns > _MOST_NS:
            return {}
        given = self._metrics(older, newer)
        return {"profiling": self._by_name(given), "profiling_ns": now_ns - before_ns}

    def _prepare(self) -> None:
        """Allocate everything, once; raises UnsupportedError where the GPU has no such counters."""
        if self._buffers:
            return
        if self._asker.is_refused((_METRICS,)):
            raise UnsupportedError(_METRICS)
        if not self._asker.insist((_QUERY,)).isSupportedDevice:
            self._asker.refuse((_METRICS,), "NotSupported")
            raise UnsupportedError(_METRICS)
        library = self._asker.library
        self._buffers = [call_nvml(library, "nvmlGpmSampleAlloc") for _ in range(2)]
        self._struct = pynvml.c_nvmlGpmMetricsGet_t()
        self._ids = [number for one in self._readings for number in _numbers(one)]

    def _take(self, buffer: Any) -> None:  # noqa: ANN401  # as the library has it
        if self._gpu_instance is None:
            self._asker.insist((_SAMPLE,), buffer)
        else:
            self._asker.insist((_MIG_SAMPLE,), self._gpu_instance, buffer)

    def _metrics(self, older: Any, newer: Any) -> dict[int, float]:  # noqa: ANN401  # as the library has it
        self._ids = [one for one in self._ids if not self._asker.is_refused((_METRICS, one))]
        try:
            return self._ask_metrics(older, newer, self._ids)
        except FailedError:
            if all((_METRICS, one) in self._asker.outcomes for one in self._ids):
                raise
        return self._ask_apart(older, newer)

    def _ask_apart(self, older: Any, newer: Any) -> dict[int, float]:  # noqa: ANN401  # as the library has it
        """Try each metric alone: one that an older driver does not know may have cost all."""
        given: dict[int, float] = {}
        for one in self._ids:
            try:
                given |= self._ask_metrics(older, newer, [one])
            except FailedError:
                self._asker.refuse((_METRICS, one), "InvalidArgument")
        return given

    def _ask_metrics(self, older: Any, newer: Any, ids: Sequence[int]) -> dict[int, float]:  # noqa: ANN401  # as the library has it
        struct, asker = self._struct, self._asker
        struct.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        struct.numMetrics = len(ids)
        struct.sample1, struct.sample2 = older, newer
        slots = [struct.metrics[place] for place in range(len(ids))]
        for slot, number in zip(slots, ids, strict=True):
            slot.metricId = number
        try:
            call_nvml(asker.library, _METRICS, struct)
        except UnsupportedError as error:
            asker.refuse((_METRICS,), reason_of(error))
            self.close()
            raise
        return {
            number: slot.value
            for slot, number in zip(slots, ids, strict=True)
            if check_code(asker, (_METRICS, number), slot.nvmlReturn) and not math.isnan(slot.value)
        }

    def _by_name(self, given: dict[int, float]) -> dict[str, Any]:
        named = {reading.name: _value(reading, given) for reading in self._readings}
        return {name: value for name, value in named.items() if value is not None}


def _numbers(reading: Reading) -> range:
    metric = reading.asked[0]
    if not isinstance(metric, Metric):
        raise TypeError(f"{reading.name} is asked by {metric}, which is no metric")
    return range(metric.number, metric.number + (metric.count or 1))


def _value(reading: Reading, given: dict[int, float]) -> float | list[float] | None:
    """Give the value, or of a list those before the first that is missing."""
    numbers = _numbers(reading)
    values = []
    for number in numbers:
        if number not in given:
            break
        values.append(given[number])
    if isinstance(reading.asked[0], Metric) and reading.asked[0].count is not None:
        return values or None
    return values[0] if values else None
