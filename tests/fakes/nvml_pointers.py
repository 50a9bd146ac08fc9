"""The real functions of nvidia-ml-py over a library of Python functions.

A function takes the driver's arguments and returns the driver's return code.
"""
# ruff: noqa: ANN401  # ctypes' pointers and structs have no types

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml
import pytest

from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu

Function = Callable[..., int]


class CLibrary:
    """The library below nvidia-ml-py: it has these functions; the others are missing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function] | None = None
    ) -> None:
        self.functions = dict(functions or {})
        self.calls: list[str] = []
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", self._find)

    def _find(self, name: str) -> Function:
        self.calls.append(name)
        if name not in self.functions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.functions[name]


def play(monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function]) -> DeviceClient:
    """Return a device of the real binding over a library that has only these functions."""
    CLibrary(monkeypatch, functions)
    return DeviceClient(library=pynvml, handle=pynvml.c_nvmlDevice_t())


def play_gpu(monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function]) -> NvidiaGpu:
    """Return a GPU of the real binding over a library that has only these functions."""
    CLibrary(monkeypatch, functions)
    return NvidiaGpu(library=pynvml, handle=pynvml.c_nvmlDevice_t(), uuid="GPU-0", index=0)


class FieldsFunction:
    """Plays `nvmlDeviceGetFieldValues`: a return code, or a (type, member, value), by field.

    Values that differ by link have keys of field and link.
    """

    def __init__(self, known: Mapping[int | tuple[int, int], Any], *, strict: bool = False) -> None:
        self.known = dict(known)
        self.strict = strict
        """Whether one unknown field makes the whole call fail, like on some old drivers."""
        self.requests: list[list[int]] = []
        self.scopes: list[list[int]] = []

    def __call__(self, handle: Any, count: Any, values: Any) -> int:
        requests = [referent_of(values)[place] for place in range(count.value)]
        self.requests.append([one.fieldId for one in requests])
        self.scopes.append([one.scopeId for one in requests])
        if self.strict and any(self._given(one) is None for one in requests):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for one in requests:
            self._fill(one)
        return 0

    def _fill(self, one: Any) -> None:
        given = self._given(one)
        if given is None:
            given = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if isinstance(given, int):
            one.nvmlReturn = given
        else:
            one.valueType, member, value = given
            setattr(one.value, member, value)

    def _given(self, one: Any) -> Any:
        return self.known.get((one.fieldId, one.scopeId), self.known.get(one.fieldId))


class GpmFunctions:
    """Plays GPM: samples are numbered, and the test computes a metric from two of them."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        """The return code of each metric without a value."""
        self.values: dict[int, float] = {}
        """The value of each metric that has one."""
        self.unknown: Sequence[int] = ()
        """Metrics that make the whole call fail."""
        self.error = 0
        """The return code of the whole call."""
        self.sample_error = 0
        """The return code of taking a sample."""
        self.supported = 1
        self.holds: dict[int, int] = {}
        """The number of the sample in each buffer, by address."""
        self.freed: list[int] = []
        self.samples = 0
        self.pairs: list[tuple[int, int]] = []
        """The pairs of samples for which metrics were requested."""
        self.structs: set[int] = set()
        """The addresses of the structs to which metrics were written."""
        self.instances: list[int] = []

    def functions(self) -> dict[str, Function]:
        """Return the functions of the library."""
        return {
            "nvmlGpmQueryDeviceSupport": self.query,
            "nvmlGpmSampleAlloc": self.allocate,
            "nvmlGpmSampleFree": self.free,
            "nvmlGpmSampleGet": lambda _device, sample: self.take(sample),
            "nvmlGpmMigSampleGet": self.take_of_instance,
            "nvmlGpmMetricsGet": self.metrics,
        }

    def query(self, device: Any, support: Any) -> int:
        referent_of(support).isSupportedDevice = self.supported
        return 0

    def allocate(self, pointer: Any) -> int:
        address = 0x1000 * (len(self.holds) + 1)
        self.holds[address] = 0
        set_address(referent_of(pointer), address)
        return 0

    def free(self, sample: Any) -> int:
        self.freed.append(address_of(sample))
        return 0

    def take(self, sample: Any) -> int:
        if self.sample_error:
            return self.sample_error
        self.samples += 1
        self.holds[address_of(sample)] = self.samples
        return 0

    def take_of_instance(self, device: Any, instance: int, sample: Any) -> int:
        self.instances.append(instance)
        return self.take(sample)

    def metrics(self, reference: Any) -> int:
        requests = referent_of(reference)
        self.structs.add(id(requests))
        ids = [requests.metrics[place].metricId for place in range(requests.numMetrics)]
        if self.error or set(ids) & set(self.unknown):
            return self.error or int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        older, newer = address_of(requests.sample1), address_of(requests.sample2)
        self.pairs.append((self.holds[older], self.holds[newer]))
        for place, number in enumerate(ids):
            given = number in self.values
            missing = self.codes.get(number, pynvml.NVML_ERROR_NOT_SUPPORTED)
            requests.metrics[place].nvmlReturn = 0 if given else missing
            requests.metrics[place].value = self.values.get(number, 77.0)
        return 0


def referent_of(reference: Any) -> Any:
    """Return the object that `ctypes.byref` made this reference from."""
    return reference._obj  # noqa: SLF001  # ctypes has no public way to get it


def address_of(pointer: Any) -> int:
    """Return the address in a pointer."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def set_address(pointer: Any, address: int) -> None:
    """Set the address in a pointer."""
    ctypes.c_void_p.from_address(ctypes.addressof(pointer)).value = address
