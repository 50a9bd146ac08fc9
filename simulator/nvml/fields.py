"""The numbered fields: many in one call, each with its own return code and type."""
# ruff: noqa: N802, N803  # NVML's own names

from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

from simulator.device import SimulatedGpu
from simulator.nvml.session import Handle, Subject

_NS: Final = 1_000_000_000
_KIB: Final = 1024
_ALL_LINKS: Final = 0xFFFFFFFF
_UINT: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
_ULONG_LONG: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_COOL_CELSIUS: Final = 34
_WARMING_CELSIUS: Final = 45
_WARMING_NS: Final = 30 * _NS
_INSTANT_NS: Final = 20_000_000
_RECOVERIES: Final = ("none", "reset", "reboot", "drain_p2p", "drain_and_reset")
_Taken = Callable[[SimulatedGpu, int, int], int | None]
"""Gives a field by the GPU, the time at which the driver was loaded, and now."""


class Fields(Subject):
    """The function that gives numbered fields."""

    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: Sequence[Any]) -> Any:  # noqa: ANN401  # ctypes structs
        """Return the fields; one that the GPU does not have says so beside the others."""
        gpu, now_ns = self._session.gpu(handle), self._session.since_epoch_ns()
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, field in zip(values, fieldIds, strict=True):
            number, scope = field if isinstance(field, tuple) else (field, 0)
            value.fieldId, value.scopeId = number, scope
            self._fill_field(value, gpu, now_ns)
        return values

    def _fill_field(self, value: Any, gpu: SimulatedGpu, now_ns: int) -> None:  # noqa: ANN401  # a ctypes struct
        value.timestamp = self._session.stamp_us(now_ns)
        known = _FIELDS.get(value.fieldId)
        if known is None or not _is_scope(value.fieldId, value.scopeId, gpu):
            value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
            return
        value.valueType, take = known
        taken = take(gpu, self._session.driver_loaded_ns, now_ns)
        if taken is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return
        if value.fieldId in _PER_LINK and value.scopeId != _ALL_LINKS:
            taken = _part_of_link(taken, value.scopeId, gpu.facts.model.nvlinks)
        if value.valueType == _UINT:
            value.value.uiVal = taken
        else:
            value.value.ullVal = taken


def _is_scope(number: int, scope: int, gpu: SimulatedGpu) -> bool:
    return number not in _PER_LINK or scope == _ALL_LINKS or scope < gpu.facts.model.nvlinks


def _part_of_link(total: int, link: int, links: int) -> int:
    """Return one link's part of what all carried: they carry alike, and their parts sum up."""
    return total // links + (link < total % links)


def _memory_celsius(gpu: SimulatedGpu, _loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.model.has_hbm:
        return None
    busy_ns = gpu.device_busy_ns(now_ns - _WARMING_NS, now_ns)
    return round(_COOL_CELSIUS + _WARMING_CELSIUS * busy_ns / _WARMING_NS)


def _instant_milliwatts(gpu: SimulatedGpu, _loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.architecture.has_instant_power:
        return None
    return round(gpu.joules(now_ns - _INSTANT_NS, now_ns) * 1000 * _NS / _INSTANT_NS)


def _throttled(*throttles: str) -> _Taken:
    def take(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int:
        ailments = gpu.facts.ailments
        until_now = ailments.throttled_ns(throttles, now_ns)
        return until_now - ailments.throttled_ns(throttles, loaded_ns)

    return take


def _pcie_bytes(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.architecture.has_profiling:
        return None
    return int(gpu.mixed_ns("pcie_bytes_per_second", loaded_ns, now_ns) / _NS)


def _nvlink_kibibytes(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.model.nvlinks:
        return None
    return int(gpu.mixed_ns("nvlink_bytes_per_second", loaded_ns, now_ns) / _NS / _KIB)


def _nvlink_replays(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.model.nvlinks:
        return None
    return gpu.facts.ailments.count("nvlink_replays", now_ns, since_ns=loaded_ns)


def _nvlinks(gpu: SimulatedGpu, _loaded_ns: int, _now_ns: int) -> int | None:
    return gpu.facts.model.nvlinks or None


def _no_nvlink_error(gpu: SimulatedGpu, _loaded_ns: int, _now_ns: int) -> int | None:
    return 0 if gpu.facts.model.nvlinks else None


def _recovery(gpu: SimulatedGpu, _loaded_ns: int, now_ns: int) -> int:
    return _RECOVERIES.index(gpu.facts.ailments.recovery(now_ns))


def _retired(gpu: SimulatedGpu, _loaded_ns: int, _now_ns: int) -> int | None:
    return None if gpu.facts.architecture.remaps_rows else 0


_PER_LINK: Final = frozenset({138, 139})
_FIELDS: Final[dict[int, tuple[int, _Taken]]] = {
    29: (_UINT, _retired),
    30: (_UINT, _retired),
    31: (_UINT, _retired),
    38: (_ULONG_LONG, _no_nvlink_error),
    45: (_ULONG_LONG, _no_nvlink_error),
    52: (_ULONG_LONG, _nvlink_replays),
    59: (_ULONG_LONG, _no_nvlink_error),
    74: (_ULONG_LONG, _throttled("power")),
    75: (_ULONG_LONG, _throttled("software_thermal", "hardware_thermal")),
    76: (_ULONG_LONG, _throttled("sync_boost")),
    77: (_ULONG_LONG, _throttled("board_limit")),
    78: (_ULONG_LONG, _throttled("low_utilization")),
    79: (_ULONG_LONG, _throttled("reliability")),
    82: (_UINT, _memory_celsius),
    91: (_UINT, _nvlinks),
    138: (_ULONG_LONG, _nvlink_kibibytes),
    139: (_ULONG_LONG, _nvlink_kibibytes),
    170: (_UINT, lambda _gpu, _loaded_ns, _now_ns: None),
    186: (_UINT, _instant_milliwatts),
    197: (_ULONG_LONG, _pcie_bytes),
    198: (_ULONG_LONG, _pcie_bytes),
    230: (_UINT, _recovery),
    269: (_ULONG_LONG, _throttled("software_thermal")),
    270: (_ULONG_LONG, _throttled("hardware_thermal")),
    271: (_ULONG_LONG, _throttled("power_brake")),
}
