"""The chip's own counters (GPM, Hopper and newer): what lies between two samples of them.

Two samples are taken in turn into two buffers; the metrics are of the time between. So the first
tick has none, and each one after it has those since the tick before, as long as the time between is
one that NVML can measure.

A MIG instance has a pair of samples of its own. A GPU instance that is one compute instance is
sampled by the GPU's handle and its id; where it is cut further, each compute instance is sampled by
its own handle, as the whole would be counted to each. Whether a value can be true is decided in
`agent.core`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import pynvml

from agent.core.units import MEBIBYTES_PER_SECOND
from agent.gpu.nvidia.catalogue import GpmMetric, MetricSpec
from agent.gpu.nvidia.client import DeviceClient, call_nvml, raw_getattr, reason_of
from agent.gpu.nvidia.library import NvmlLibrary
from agent.gpu.nvidia.mig import InstanceClient
from agent.gpu.nvidia.query import check_code, mark_if_unsupported
from agent.gpu.source import FailedError, UnsupportedError

MIN_NS: Final = 100_000_000
"""NVML's least time between two samples."""
_MAX_NS: Final = 600_000_000_000
_METRICS: Final = "nvmlGpmMetricsGet"


class Gpm:
    """The counters of one GPU, or of one GPU instance of it."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
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
        self._wanted = [_wanted(spec) for spec in specs]
        self._monotonic_ns = monotonic_ns
        self._gpu_instance = gpu_instance
        self._buffers: list[object] = []
        self._taken_ns: int | None = None
        self._struct: Any = None
        self._ids: list[int] = []
        self._slots: list[tuple[int, Any]] = []
        self._support_version = 0
        self._is_querying = False

    def query(self) -> dict[str, Any]:
        """Return `profiling`, by our names, and the time that it is of as `profiling_ns`.

        Empty where there is nothing to tell: the GPU has no such counters, or no sample before
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
        self._prepare()
        older, newer = self._buffers
        self._sample_into(newer)
        before_ns, self._taken_ns = self._taken_ns, now_ns
        # The newer one is the older one of the next time, whatever comes of this one.
        self._buffers = [newer, older]
        if before_ns is None or now_ns - before_ns > _MAX_NS:
            return {}
        return {
            "profiling": self._by_name(self._metrics(older, newer)),
            "profiling_ns": now_ns - before_ns,
        }

    def _prepare(self) -> None:
        """Allocate everything, once; raises UnsupportedError where the GPU has no such counters."""
        if self._buffers:
            return
        if self._client.is_unsupported((_METRICS,)):
            raise UnsupportedError(_METRICS)
        # Of the GPU, as an instance answers for it or not, by its driver.
        if not self._whole.query_or_raise(NvmlLibrary.nvmlGpmQueryDeviceSupport).isSupportedDevice:
            self._client.mark_unsupported((_METRICS,), "NotSupported")
            raise UnsupportedError(_METRICS)
        library = self._client.library
        self._buffers = [call_nvml(library, NvmlLibrary.nvmlGpmSampleAlloc) for _ in range(2)]
        self._struct = pynvml.c_nvmlGpmMetricsGet_t()
        self._lay_out(self._possible())

    def _sample_into(self, buffer: object) -> None:
        if self._gpu_instance is None:
            self._client.query_or_raise(NvmlLibrary.nvmlGpmSampleGet, buffer)
        else:
            self._client.query_or_raise(NvmlLibrary.nvmlGpmMigSampleGet, self._gpu_instance, buffer)

    def _metrics(self, older: object, newer: object) -> dict[int, float]:
        struct = self._struct
        struct.sample1, struct.sample2 = older, newer
        if self._client.support_version != self._support_version:
            self._lay_out(self._possible())
        try:
            return self._query_metrics()
        except UnsupportedError as error:
            self._client.mark_unsupported((_METRICS,), reason_of(error))
            self._free()
            raise
        except FailedError:
            if all((_METRICS, one) in self._client.outcomes for one in self._ids):
                raise
        return self._query_apart()

    def _query_apart(self) -> dict[int, float]:
        """Try each metric alone, once: one that an older driver lacks may have cost all."""
        given: dict[int, float] = {}
        for one in self._ids:
            self._lay_out([one])
            try:
                given |= self._query_metrics()
            except (UnsupportedError, FailedError) as error:
                mark_if_unsupported(self._client, (_METRICS, one), error)
        self._lay_out(self._possible())
        return given

    def _lay_out(self, ids: list[int]) -> None:
        """Write into the struct what is asked; it stays there from call to call."""
        self._ids, self._support_version = ids, self._client.support_version
        self._struct.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._struct.numMetrics = len(ids)
        self._slots = [(one, self._struct.metrics[position]) for position, one in enumerate(ids)]
        for number, slot in self._slots:
            slot.metricId = number

    def _query_metrics(self) -> dict[int, float]:
        client, given = self._client, {}
        call_nvml(client.library, NvmlLibrary.nvmlGpmMetricsGet, self._struct)
        for number, slot in self._slots:
            if check_code(client, (_METRICS, number), raw_getattr(slot, "nvmlReturn")):
                value = raw_getattr(slot, "value")
                if value == value:  # noqa: PLR0124  # not so of NaN, which is no data
                    given[number] = value
        return given

    def _possible(self) -> list[int]:
        """Return the metrics that are not refused."""
        numbers = (number for _, numbers, _ in self._wanted for number in numbers)
        return [one for one in numbers if not self._client.is_unsupported((_METRICS, one))]

    def _by_name(self, given: dict[int, float]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for name, numbers, is_list in self._wanted:
            if is_list:
                # A place in the list is an engine's number: it ends at the first that is missing.
                values = list(takewhile(lambda value: value is not None, map(given.get, numbers)))
                named[name] = values or None
            else:
                named[name] = given.get(numbers[0])
        return {name: value for name, value in named.items() if value is not None}


def _wanted(spec: MetricSpec) -> tuple[str, range, bool]:
    """Return our name, the metrics' numbers, and whether they make a list."""
    metric = spec.sources[0]
    if not isinstance(metric, GpmMetric):
        raise TypeError(f"{spec.name} comes from {metric}, which is no metric")
    numbers = range(metric.number, metric.number + (metric.count or 1))
    return spec.name, numbers, metric.count is not None


class InstanceCounters:
    """The counters of one GPU's instances."""

    def __init__(
        self,
        client: DeviceClient,
        specs: Sequence[MetricSpec],
        *,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._client = client
        # By NVML's own words the links' flows are the GPU's: told of each instance they would be
        # counted once for each.
        self._specs = [spec for spec in specs if spec.unit is not MEBIBYTES_PER_SECOND]
        self._monotonic_ns = monotonic_ns
        self._of: dict[tuple[str, bool], Gpm] = {}

    def query(self, instances: Sequence[InstanceClient]) -> Mapping[str, Mapping[str, Any]]:
        """Return what `Gpm.query` gives, by the instance's UUID; raises SourceLostError."""
        if not instances and not self._of:
            return {}
        sizes = Counter(instance.identity.gpu_instance for instance in instances)
        wanted = {
            (one.identity.uuid, sizes[one.identity.gpu_instance] == 1): one for one in instances
        }
        for key in self._of.keys() - wanted.keys():
            self._of.pop(key).close()
        return {key[0]: self._gpm(key, instance).query() for key, instance in wanted.items()}

    def close(self) -> None:
        """Free the buffers; the library must be open."""
        for gpm in self._of.values():
            gpm.close()
        self._of.clear()

    def _gpm(self, key: tuple[str, bool], instance: InstanceClient) -> Gpm:
        if key not in self._of:
            self._of[key] = self._open(instance, is_alone=key[1])
        return self._of[key]

    def _open(self, instance: InstanceClient, *, is_alone: bool) -> Gpm:
        number = instance.identity.gpu_instance if is_alone else None
        client = instance.client
        if number is not None:
            client = DeviceClient(library=self._client.library, handle=self._client.handle)
        return Gpm(
            client,
            self._specs,
            monotonic_ns=self._monotonic_ns,
            gpu_instance=number,
            whole=self._client,
        )
