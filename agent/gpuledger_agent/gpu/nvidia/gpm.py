"""Queries metrics from the chip's own counters (GPM, Hopper and newer).

NVML computes the metrics from two samples of the counters, for the time between them. Samples are
written alternately to two buffers. The first query thus returns nothing, and each later query
covers the time since the previous one, if NVML can measure an interval of that length.

Metrics with different query intervals have separate pairs of samples. Metrics queried in each tick
cover that tick. Metrics queried every few seconds cover all the time since their previous query, so
they miss no activity.

Each MIG instance also has its own pair of samples. A GPU instance with one compute instance is
sampled through the GPU's handle and the instance's id. If a GPU instance has several compute
instances, each is sampled through its own handle, because otherwise each would get the values of
the whole GPU instance.

`gpuledger_agent.core` decides which values are plausible.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import pynvml

from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.core.readings import MEBIBYTES_PER_SECOND
from gpuledger_agent.gpu.nvidia.catalogue import GpmMetric, MetricSpec
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient, call_nvml, raw_getattr, reason_of
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.nvidia.mig import InstanceClient
from gpuledger_agent.gpu.nvidia.query import check_code, mark_if_unsupported
from gpuledger_agent.gpu.protocol import FailedError, UnsupportedError

MIN_NS: Final = 100 * NS_PER_MS
"""NVML's minimum time between two samples."""
# Twice the longest interval that can be configured. A mean over a longer gap is not meaningful.
_MAX_NS: Final = 2 * NS_PER_MINUTE
_METRICS: Final = "nvmlGpmMetricsGet"
_FIELDS: Final = {
    CallGroup.SENSORS: "activity",
    CallGroup.PROFILING: "profiling",
    CallGroup.HEALTH: "health",
}
"""The field of `RawGpuSample` that contains the metrics, by call group."""


class GpmQuery:
    """Queries one device's GPM metrics, given two samples.

    NVML's struct for the query has room for every metric (19 KB). It is therefore created once, and
    keeps the ids of the wanted metrics between calls.
    """

    def __init__(self, client: DeviceClient, specs: Sequence[MetricSpec]) -> None:
        self._client = client
        self._wanted: list[tuple[str, GpmMetric]] = []
        for spec in specs:
            metric = spec.sources[0]
            if not isinstance(metric, GpmMetric):
                raise TypeError(f"{spec.name}: its source is not a GPM metric: {metric}")
            self._wanted.append((spec.name, metric))
        self._struct: Any = None
        self._ids: list[int] = []
        self._slots: list[tuple[int, Any]] = []
        self._support_version: int | None = None

    def query(self, older: object, newer: object) -> dict[str, Any]:
        """Return the metrics for the time between two samples, by name of the reading.

        Missing values are left out.

        Raises `FailedError`, `SourceLostError` or, if the device has no metrics,
        `UnsupportedError`.
        """
        if self._struct is None:
            self._struct = pynvml.c_nvmlGpmMetricsGet_t()
        if self._support_version != self._client.support_version:
            self._lay_out()
        if not self._slots:
            return {}
        self._struct.sample1, self._struct.sample2 = older, newer
        try:
            values = self._call()
        except UnsupportedError as error:
            self._client.mark_unsupported((_METRICS,), reason_of(error))
            raise
        except FailedError:
            # If each metric was queried separately before, no single metric is the cause.
            if all((_METRICS, number) in self._client.outcomes for number in self._ids):
                raise
            values = self._query_apart()
        named = {name: _value_of(metric, values) for name, metric in self._wanted}
        return {name: value for name, value in named.items() if value is not None}

    def _query_apart(self) -> dict[int, float]:
        """Query each metric in a separate call; return the values by metric id.

        If the driver does not support one metric, a call for several metrics may fail.
        """
        values: dict[int, float] = {}
        for number in self._ids:
            self._lay_out([number])
            try:
                values |= self._call()
            except (UnsupportedError, FailedError) as error:
                mark_if_unsupported(self._client, (_METRICS, number), error)
        self._lay_out()
        return values

    def _lay_out(self, ids: Sequence[int] | None = None) -> None:
        """Write ids of metrics into the struct, for the next call.

        Without `ids`, write those of all wanted metrics that the driver has not refused.
        """
        if ids is None:
            numbers = (number for _, metric in self._wanted for number in metric.numbers)
            ids = self._ids = [
                number for number in numbers if not self._client.is_unsupported((_METRICS, number))
            ]
        self._support_version = self._client.support_version
        self._struct.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._struct.numMetrics = len(ids)
        self._slots = [(number, self._struct.metrics[index]) for index, number in enumerate(ids)]
        for number, slot in self._slots:
            slot.metricId = number

    def _call(self) -> dict[int, float]:
        client, values = self._client, {}
        call_nvml(client.library, NvmlLibrary.nvmlGpmMetricsGet, self._struct)
        for number, slot in self._slots:
            # Each metric has its own return code, because a metric may be refused separately.
            if check_code(client, (_METRICS, number), raw_getattr(slot, "nvmlReturn")):
                value = raw_getattr(slot, "value")
                if value == value:  # noqa: PLR0124  # false for NaN, which means no data
                    values[number] = value
        return values


def _value_of(
    metric: GpmMetric, values: Mapping[int, float]
) -> float | list[float] | dict[int, float] | None:
    """Return a reading's value from the values by metric id; `None` if there are none.

    The result is a single value, a list by engine, or a mapping by link number.
    """
    if metric.count is None:
        return values.get(metric.number)
    if metric.is_by_link:
        numbers = enumerate(metric.numbers)
        return {link: values[number] for link, number in numbers if number in values} or None
    # The list ends at the first missing value, because an index is an engine's number.
    there = takewhile(values.__contains__, metric.numbers)
    return [values[number] for number in there] or None


class Gpm:
    """Queries one call group's GPM metrics of one GPU or one MIG instance."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
        group: CallGroup,
        monotonic_ns: Callable[[], int],
        gpu_instance: int | None = None,
        whole: DeviceClient | None = None,
    ) -> None:
        """Create the query of one device.

        For a GPU, `client` has the GPU's handle. For a GPU instance, `client` has the GPU's handle
        too, and `gpu_instance` is the instance's id. For a compute instance, `client` has that
        instance's own handle. `whole` is the client for the GPU that contains an instance. Each
        instance needs a separate `client`, because an instance may refuse metrics that the GPU
        supports.
        """
        self._client = client
        self._whole = whole or client
        self._metrics = GpmQuery(client, specs)
        self._field = _FIELDS[group]
        self._monotonic_ns = monotonic_ns
        self._gpu_instance = gpu_instance
        self._buffers: list[object] = []
        self._taken_ns: int | None = None
        self._is_querying = False

    def query(self) -> dict[str, Any]:
        """Return the metrics since the previous query, and the time that they cover.

        The result has two keys: `activity` and `activity_ns` for group SENSORS, `profiling` and
        `profiling_ns` for PROFILING, `health` and `health_ns` for HEALTH. The first key maps names
        of readings to values; the second is the covered time in nanoseconds.

        The result is empty if the GPU has no such counters, if a call fails, or if the previous
        sample is missing, too old or too recent. Raises `SourceLostError`.
        """
        now_ns = self._monotonic_ns()
        # Keep the previous sample, so that the next query measures from it.
        if self._taken_ns is not None and now_ns - self._taken_ns < MIN_NS:
            return {}
        self._is_querying = True
        try:
            return self._query(now_ns)
        except (UnsupportedError, FailedError):
            return {}
        finally:
            self._is_querying = False

    def close(self) -> None:
        """Free the buffers of the samples, unless a query is running; the library must be open."""
        # A call that hangs in another thread may still write into the buffers.
        if not self._is_querying:
            self._free()

    def _free(self) -> None:
        buffers, self._buffers, self._taken_ns = self._buffers, [], None
        for buffer in buffers:
            try:
                call_nvml(self._client.library, NvmlLibrary.nvmlGpmSampleFree, buffer)
            except (UnsupportedError, FailedError):
                continue  # this leaks only a few hundred bytes

    def _query(self, now_ns: int) -> dict[str, Any]:
        self._allocate()
        older, newer = self._buffers
        if self._gpu_instance is None:
            taken = self._client.query_varying(NvmlLibrary.nvmlGpmSampleGet, newer)
        else:
            function = NvmlLibrary.nvmlGpmMigSampleGet
            taken = self._client.query_varying(function, self._gpu_instance, newer)
        if taken is None:
            return {}
        before_ns, self._taken_ns = self._taken_ns, now_ns
        # The next query uses the newer sample as the older one, even if this query fails.
        self._buffers = [newer, older]
        # After a long gap, start again: the chip's counters may have wrapped meanwhile.
        if before_ns is None or now_ns - before_ns > _MAX_NS:
            return {}
        try:
            values = self._metrics.query(older, newer)
        except UnsupportedError:
            self._free()
            raise
        return {self._field: values, f"{self._field}_ns": now_ns - before_ns}

    def _allocate(self) -> None:
        """Allocate the buffers of the samples, unless they exist.

        Raise `UnsupportedError` if the GPU has no GPM counters, and `FailedError` if the driver
        does not report whether it has them.
        """
        if self._buffers:
            return
        if self._client.is_unsupported((_METRICS,)):
            raise UnsupportedError(_METRICS)
        # Query the whole GPU, because not all drivers answer this query for an instance.
        support = self._whole.query(NvmlLibrary.nvmlGpmQueryDeviceSupport)
        if support is None:
            raise FailedError("nvmlGpmQueryDeviceSupport: no answer")
        if not support.isSupportedDevice:
            self._client.mark_unsupported((_METRICS,), "NotSupported")
            raise UnsupportedError(_METRICS)
        library = self._client.library
        self._buffers = [call_nvml(library, NvmlLibrary.nvmlGpmSampleAlloc) for _ in range(2)]


class InstanceCounters:
    """Queries one call group's GPM metrics of the MIG instances of one GPU."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
        group: CallGroup,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._client, self._group = client, group
        # According to NVML, link throughput is always that of the whole GPU. It is left out here,
        # because values of several instances would count it several times.
        self._specs = [spec for spec in specs if spec.unit is not MEBIBYTES_PER_SECOND]
        self._monotonic_ns = monotonic_ns
        self._of: dict[tuple[str, bool], Gpm] = {}

    def query(self, instances: Sequence[InstanceClient]) -> Mapping[str, Mapping[str, Any]]:
        """Return the result of `Gpm.query` for each instance, by UUID; raises SourceLostError."""
        if not instances and not self._of:
            return {}
        sizes = Counter(instance.identity.gpu_instance for instance in instances)
        # If a GPU instance gets or loses a second compute instance, its sampling starts again,
        # because the two cases are sampled differently.
        wanted = {
            (instance.identity.uuid, sizes[instance.identity.gpu_instance] == 1): instance
            for instance in instances
        }
        for key in self._of.keys() - wanted.keys():
            self._of.pop(key).close()
        for uuid, is_alone in wanted.keys() - self._of.keys():
            instance = wanted[uuid, is_alone]
            number = instance.identity.gpu_instance if is_alone else None
            client = instance.client
            if number is not None:
                # A separate client with the GPU's handle, because the instance may refuse metrics
                # that the GPU supports.
                client = DeviceClient(library=self._client.library, handle=self._client.handle)
            self._of[uuid, is_alone] = Gpm(
                client,
                self._specs,
                group=self._group,
                monotonic_ns=self._monotonic_ns,
                gpu_instance=number,
                whole=self._client,
            )
        return {key[0]: self._of[key].query() for key in wanted}

    def close(self) -> None:
        """Free the buffers of the samples; the library must be open."""
        for gpm in self._of.values():
            gpm.close()
        self._of.clear()


class ChipCounters:
    """Queries one call group's GPM metrics of one GPU and its MIG instances."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
        group: CallGroup,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._whole = Gpm(client, specs, group=group, monotonic_ns=monotonic_ns)
        self._instances = InstanceCounters(client, specs, group=group, monotonic_ns=monotonic_ns)
        self._field = f"instance_{_FIELDS[group]}"

    def query(self, instances: Sequence[InstanceClient]) -> dict[str, Any]:
        """Return the metrics of the GPU and the instances, keyed by field of `RawGpuSample`.

        Raises `SourceLostError`.
        """
        of_instances = self._instances.query(instances)
        return {**self._whole.query(), self._field: of_instances}

    def close(self) -> None:
        """Free the buffers of the samples; the library must be open."""
        self._whole.close()
        self._instances.close()


def is_of_chip(spec: MetricSpec) -> bool:
    """Return whether a reading comes from the chip's own counters (GPM)."""
    return isinstance(spec.sources[0], GpmMetric)
