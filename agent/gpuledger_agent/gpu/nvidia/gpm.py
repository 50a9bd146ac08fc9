"""The chip's own counters (GPM, Hopper and newer): what lies between two samples of them.

Two samples are taken in turn into two buffers; the metrics are of the time between. So the first
query has none, and each one after it has those since the query before, as long as the time between
is one that NVML can measure.

Metrics of different paces have pairs of samples of their own: those of each tick are of that tick
alone, and those that are queried every few seconds are of all the time since, so that nothing that
happened in between is left out.

A MIG instance has a pair of samples of its own. A GPU instance that is one compute instance is
sampled by the GPU's handle and its id; where it is cut further, each compute instance is sampled by
its own handle, as the whole would be counted to each. Whether a value can be true is decided in
`gpuledger_agent.core`.
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
"""NVML's least time between two samples."""
# Twice the longest pause that can be set: after a silence a mean says little of now.
_MAX_NS: Final = 2 * NS_PER_MINUTE
_METRICS: Final = "nvmlGpmMetricsGet"
_FIELDS: Final = {
    CallGroup.SENSORS: "activity",
    CallGroup.PROFILING: "profiling",
    CallGroup.HEALTH: "health",
}
"""Fields of `RawGpuSample`, by the group whose metrics they have."""


class GpmQuery:
    """The metrics of one device, and the struct in which NVML is asked for them.

    The struct has room for every metric that there is (19 KB), so it is made once, and what is
    wanted stays in it from call to call.
    """

    def __init__(self, client: DeviceClient, specs: Sequence[MetricSpec]) -> None:
        self._client = client
        self._wanted: list[tuple[str, GpmMetric]] = []
        for spec in specs:
            metric = spec.sources[0]
            if not isinstance(metric, GpmMetric):
                raise TypeError(f"{spec.name} comes from {metric}, which is no metric")
            self._wanted.append((spec.name, metric))
        self._struct: Any = None
        self._ids: list[int] = []
        self._slots: list[tuple[int, Any]] = []
        self._support_version: int | None = None

    def query(self, older: object, newer: object) -> dict[str, Any]:
        """Return by our names what lies between two samples.

        Raises UnsupportedError where the device has no metrics, FailedError and SourceLostError.
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
            # Each was queried alone before, so no single one of them is the reason.
            if all((_METRICS, number) in self._client.outcomes for number in self._ids):
                raise
            values = self._query_apart()
        named = {name: _value_of(metric, values) for name, metric in self._wanted}
        return {name: value for name, value in named.items() if value is not None}

    def _query_apart(self) -> dict[int, float]:
        """Try each metric alone, once: one that an older driver lacks may have cost all."""
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
        """Write into the struct which metrics are wanted: those that are not refused, or `ids`."""
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
            # The call may succeed and each metric still be refused: both have a code.
            if check_code(client, (_METRICS, number), raw_getattr(slot, "nvmlReturn")):
                value = raw_getattr(slot, "value")
                if value == value:  # noqa: PLR0124  # not so of NaN, which is no data
                    values[number] = value
        return values


def _value_of(
    metric: GpmMetric, values: Mapping[int, float]
) -> float | list[float] | dict[int, float] | None:
    """Return the value of a metric, of all its engines or its links; `None` where there is none."""
    if metric.count is None:
        return values.get(metric.number)
    if metric.is_by_link:
        numbers = enumerate(metric.numbers)
        return {link: values[number] for link, number in numbers if number in values} or None
    # An index in the list is an engine's number: it ends at the first missing one.
    there = takewhile(values.__contains__, metric.numbers)
    return [values[number] for number in there] or None


class Gpm:
    """The counters of one GPU, or of one GPU instance of it."""

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
        """`client` queries the GPU itself, also where `gpu_instance` names an instance of it.

        An instance needs a client of its own, as it refuses metrics that the GPU does not. Where
        `client` queries a compute instance, `whole` queries the GPU that has the counters.
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
        """Return `profiling`, by our names, and the time that it is of as `profiling_ns`.

        `activity` and `activity_ns` for the sensors, `health` and `health_ns` for the health.

        Empty where there is nothing to report: the GPU has no such counters, or no sample before
        this one, or one that is too old or too young. Raises SourceLostError.
        """
        now_ns = self._monotonic_ns()
        # The sample before stays: the next tick measures from there.
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
        """Free the buffers; the library must be open."""
        # A call that hangs in another thread may yet write into them: they are left to it.
        if not self._is_querying:
            self._free()

    def _free(self) -> None:
        buffers, self._buffers, self._taken_ns = self._buffers, [], None
        for buffer in buffers:
            try:
                call_nvml(self._client.library, NvmlLibrary.nvmlGpmSampleFree, buffer)
            except (UnsupportedError, FailedError):
                continue  # a few hundred bytes, and nobody to give them back to

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
        # The newer one is the older one of the next time, whatever comes of this one.
        self._buffers = [newer, older]
        # After so long a gap it begins anew: the chip's counters may have wrapped meanwhile.
        if before_ns is None or now_ns - before_ns > _MAX_NS:
            return {}
        try:
            values = self._metrics.query(older, newer)
        except UnsupportedError:
            self._free()
            raise
        return {self._field: values, f"{self._field}_ns": now_ns - before_ns}

    def _allocate(self) -> None:
        """Allocate the buffers, once; raise UnsupportedError where the GPU has no such counters."""
        if self._buffers:
            return
        if self._client.is_unsupported((_METRICS,)):
            raise UnsupportedError(_METRICS)
        # Of the GPU, as an instance answers for it or not, by its driver.
        support = self._whole.query(NvmlLibrary.nvmlGpmQueryDeviceSupport)
        if support is None:
            raise FailedError("nvmlGpmQueryDeviceSupport: no answer")
        if not support.isSupportedDevice:
            self._client.mark_unsupported((_METRICS,), "NotSupported")
            raise UnsupportedError(_METRICS)
        library = self._client.library
        self._buffers = [call_nvml(library, NvmlLibrary.nvmlGpmSampleAlloc) for _ in range(2)]


class InstanceCounters:
    """The counters of one GPU's instances."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
        group: CallGroup,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._client, self._group = client, group
        # By NVML's own words the links' flows are the GPU's: reported of each instance they would
        # be counted once for each.
        self._specs = [spec for spec in specs if spec.unit is not MEBIBYTES_PER_SECOND]
        self._monotonic_ns = monotonic_ns
        self._of: dict[tuple[str, bool], Gpm] = {}

    def query(self, instances: Sequence[InstanceClient]) -> Mapping[str, Mapping[str, Any]]:
        """Return what `Gpm.query` returns, by the instance's UUID; raises SourceLostError."""
        if not instances and not self._of:
            return {}
        sizes = Counter(instance.identity.gpu_instance for instance in instances)
        # An instance that is alone no more is sampled in another way, so from the beginning.
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
                # The GPU's handle with a client of its own: it refuses what the GPU does not.
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
        """Free the buffers; the library must be open."""
        for gpm in self._of.values():
            gpm.close()
        self._of.clear()


class ChipCounters:
    """One group's counters of one GPU and of its instances."""

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
        """Return the group's fields of `RawGpuSample`; raises SourceLostError."""
        of_instances = self._instances.query(instances)
        return {**self._whole.query(), self._field: of_instances}

    def close(self) -> None:
        """Free the buffers; the library must be open."""
        self._whole.close()
        self._instances.close()


def is_of_chip(spec: MetricSpec) -> bool:
    """Return whether a reading comes from the chip's own counters."""
    return isinstance(spec.sources[0], GpmMetric)
