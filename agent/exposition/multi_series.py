"""DCGM's fields that have several series of a device, told apart by labels of their own. Pure.

Here lives dcgm-exporter's own part of them (`DCGM_EXP_…`): events of a window, peers, health.
Health is no word of DCGM's: it is judged from the readings, and only what they can tell is judged.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from agent.exposition.devices import ShownDevice
from agent.exposition.text import Labels
from gpuledger.records import GpuHealth, GpuThrottling


class EventWindow(NamedTuple):
    """Over which time events are recent."""

    since_ns: int
    """When it begins, by the clock that never goes back."""
    label: str
    """Its length in milliseconds, as dcgm-exporter writes it."""


Series = Iterator[tuple[Labels, float]]
_PASS: Final = 0
_WARN: Final = 10
_FAIL: Final = 20
_FINE: Final = (_PASS, "DCGM_FR_OK")
_ALL: Final = "ALL"
# 79, and none: the XIDs that came before the agent's start are not known.
_OFF_THE_BUS: Final = (0, 79)
_THERMAL_REASONS: Final = 0x20 | 0x40
_POWER_BRAKE_REASON: Final = 0x80
_LINKS: Final = (
    ("ok", "OK"),
    ("chipset_not_supported", "ChipsetNotSupported"),
    ("gpu_not_supported", "GPUNotSupported"),
    ("topology_not_supported", "TopologyNotSupported"),
    ("disabled_by_regkey", "DisabledByRegKey"),
    ("not_supported", "NotSupported"),
)
_LINK_CODES: Final = {name: (code, words) for code, (name, words) in enumerate(_LINKS)}
_UNKNOWN_LINK: Final = (len(_LINKS), "Unknown")


def _xids(device: ShownDevice, window: EventWindow) -> Series:
    if device.events:
        yield from _counted("xid", device.events.recent_xids(window.since_ns), window)


def _clock_events(device: ShownDevice, window: EventWindow) -> Series:
    if device.events and not device.is_silent:
        found = device.events.recent_clock_events(window.since_ns)
        yield from _counted("clock_event", found, window)


def _counted(label: str, found: dict[str, int], window: EventWindow) -> Series:
    """Yield a series for each kind, or one zero without a kind, as dcgm-exporter does."""
    head = ("window_size_in_ms", window.label)
    if not found:
        yield [head], 0
    for what, count in found.items():
        yield [head, (label, what)], count


def _peers(device: ShownDevice, _: EventWindow) -> Series:
    if device.facts is None or device.node is None or device.events is None or device.is_silent:
        return
    indices = {gpu.uuid: gpu.index for gpu in device.node.gpus}
    for uuid, status in (device.facts.nvlink_peers or {}).items():
        if uuid in indices:
            code, words = _LINK_CODES.get(status, _UNKNOWN_LINK)
            yield [("peer_gpu", str(indices[uuid])), ("link_status", words)], code


def _health(device: ShownDevice, _: EventWindow) -> Series:
    health, throttling = device.health, device.throttling
    judged = [
        ("MEM", _memory(health) if health else None),
        ("NVLINK", _nvlink(health) if health else None),
        ("THERMAL", _thermal(throttling) if throttling else None),
        ("POWER", _power(throttling) if throttling else None),
    ]
    verdicts = [(watch, verdict) for watch, verdict in judged if verdict]
    if device.is_lost:
        verdicts = [(_ALL, _lost(device))]
    elif verdicts:
        verdicts.append((_ALL, max(verdict for _, verdict in verdicts)))
    for watch, (code, error) in verdicts:
        yield [("health_watch", watch), ("health_error_code", error)], code


def _lost(device: ShownDevice) -> tuple[int, str]:
    """Return what DCGM says of a GPU that the driver has lost, by the XID that came with it."""
    xid = device.events.last_xid if device.events else 0
    return _FAIL, "DCGM_FR_FALLEN_OFF_BUS" if xid in _OFF_THE_BUS else "DCGM_FR_XID_ERROR"


def _memory(health: GpuHealth) -> tuple[int, str] | None:
    if health.ecc_uncorrected_volatile_total is None and health.remapped_rows_failed is None:
        return None
    if health.remapped_rows_failed:
        return _FAIL, "DCGM_FR_ROW_REMAP_FAILURE"
    if health.ecc_uncorrected_volatile_total:
        return _FAIL, "DCGM_FR_VOLATILE_DBE_DETECTED"
    if health.remapped_rows_pending:
        return _WARN, "DCGM_FR_PENDING_ROW_REMAP"
    if health.retired_pages_pending:
        return _WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"
    return _FINE


def _nvlink(health: GpuHealth) -> tuple[int, str] | None:
    if health.nvlink_recoveries_total is None:
        return None
    if health.nvlink_recoveries_total:
        return _FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL"
    errors = (
        health.nvlink_replays_total,
        health.nvlink_crc_data_errors_total,
        health.nvlink_crc_flit_errors_total,
    )
    return (_WARN, "DCGM_FR_NVLINK_ERROR_THRESHOLD") if any(errors) else _FINE


def _thermal(throttling: GpuThrottling) -> tuple[int, str] | None:
    if throttling.reasons is None:
        return None
    is_hot = throttling.reasons & _THERMAL_REASONS
    return (_WARN, "DCGM_FR_CLOCK_THROTTLE_THERMAL") if is_hot else _FINE


def _power(throttling: GpuThrottling) -> tuple[int, str] | None:
    if throttling.reasons is None:
        return None
    is_braked = throttling.reasons & _POWER_BRAKE_REASON
    return (_WARN, "DCGM_FR_CLOCK_THROTTLE_POWER") if is_braked else _FINE


SEVERAL: Final[dict[str, Callable[[ShownDevice, EventWindow], Series]]] = {
    "several.xids": _xids,
    "several.clock_events": _clock_events,
    "several.peers": _peers,
    "several.health": _health,
}
"""What gives the series, by the path in the table."""
