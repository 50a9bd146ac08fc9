"""An event's readings under the names of OpenTelemetry's hardware conventions (`hw.gpu.…`).

Here lives the one table of these names, for remote-write and OTLP alike. It has the names in
Prometheus, to which OpenTelemetry's rules of translation bring the conventions' own: dots become
`_`, the unit comes behind, and `_total` behind a counter's. Labels are attributes likewise. The
conventions are in development: names may change, and there is none for on whom a GPU is booked.
What is read of errors and traffic is no part of an event (`gpuledger.ledger.health`). Pure.
"""

from collections.abc import Mapping
from typing import Final

from gpuledger.ledger.aliases import NO_XIDS, AliasMetric, alias_devices
from gpuledger.ledger.families import Family, FamilyMetric, OverInterval
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import GpuEvent, GpuReading

HARDWARE_ATTRIBUTES: Final = {
    name.replace(".", "_"): name
    for name in (
        "hw.id",
        "hw.type",
        "hw.name",
        "hw.vendor",
        "hw.model",
        "hw.parent",
        "hw.gpu.task",
        "hw.sensor_location",
        "error.type",
        "network.io.direction",
    )
}
"""The conventions' name of each label."""
GPU_TYPE: Final = "gpu"
"""The value of `hw_type`."""
_LABELS: Final = ("hw_id", "hw_type", "hw_name", "hw_vendor", "hw_model", "hw_parent")


def _memory_utilization(reading: GpuReading) -> float | None:
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    return used / total if used is not None and total else None


def _per_thousand(amount: int | None) -> float | None:
    return None if amount is None else amount / 1000


_OF_TASKS: Final = (
    AliasMetric(
        FamilyMetric(
            name="hw_gpu_utilization_ratio",
            help="Fraction of time in which the GPU worked; of the task `general`: any kernel.",
        ),
        lambda reading: reading.utilization_ratio,
    ),
)
_OF_BOARDS: Final = (
    AliasMetric(
        FamilyMetric(
            name="hw_energy_joules_total",
            help="The driver's energy counter; it starts again when the driver is loaded.",
            kind="counter",
            over_interval=OverInterval.LAST,
        ),
        lambda reading: _per_thousand(reading.energy_total_millijoules),
    ),
    AliasMetric(
        FamilyMetric(name="hw_power_watts", help="Power draw."),
        lambda reading: _per_thousand(reading.power_milliwatts),
    ),
)
_OF_MEMORIES: Final = (
    AliasMetric(
        FamilyMetric(
            name="hw_gpu_memory_limit_bytes", help="Size of the device memory.", is_additive=True
        ),
        lambda reading: reading.memory_total_bytes,
    ),
    AliasMetric(
        FamilyMetric(
            name="hw_gpu_memory_usage_bytes",
            help="Device memory in use, without what the driver reserved.",
            is_additive=True,
        ),
        lambda reading: reading.memory_used_bytes,
    ),
    AliasMetric(
        FamilyMetric(
            name="hw_gpu_memory_utilization_ratio", help="Fraction of the device memory in use."
        ),
        _memory_utilization,
    ),
)
_OF_SENSORS: Final = (
    AliasMetric(
        FamilyMetric(name="hw_temperature_celsius", help="Temperature of the die."),
        lambda reading: reading.temperature_celsius,
    ),
)


def _family(labels: tuple[str, ...], metrics: tuple[AliasMetric, ...]) -> Family:
    return Family(labels=labels, metrics=tuple(one.metric for one in metrics), is_alias=True)


TASKS: Final = _family((*_LABELS, "hw_gpu_task"), _OF_TASKS)
BOARDS: Final = _family(_LABELS, _OF_BOARDS)
MEMORIES: Final = _family(_LABELS, _OF_MEMORIES)
SENSORS: Final = _family(("hw_id", "hw_name", "hw_sensor_location"), _OF_SENSORS)
ERRORS: Final = Family(
    labels=("hw_id", "hw_type", "error_type"),
    metrics=(
        FamilyMetric(
            name="hw_errors_total",
            help="Memory errors since the driver was loaded.",
            kind="counter",
        ),
    ),
    is_alias=True,
)
TRAFFIC: Final = Family(
    labels=("hw_id", "hw_type", "network_io_direction"),
    metrics=(
        FamilyMetric(
            name="hw_gpu_io_bytes_total",
            help="Bytes over PCIe, as the GPU receives and transmits them.",
            kind="counter",
        ),
    ),
    is_alias=True,
)
HARDWARE_FAMILIES: Final = (TASKS, MEMORIES, BOARDS, SENSORS, ERRORS, TRAFFIC)
"""All of them; the last two are made of readings."""


class HardwareSeries:
    """Makes those of the series that are made of events."""

    families = HARDWARE_FAMILIES
    """With those of readings, which go with them."""

    def values_of(
        self, event: GpuEvent, last_xids: Mapping[str, int] = NO_XIDS
    ) -> dict[SeriesGroup, SeriesValues]:
        """Return the values of each group; XIDs are no readings, and are left out."""
        del last_xids
        values: dict[SeriesGroup, SeriesValues] = {}
        for device in alias_devices(event):
            reading = device.reading
            name = _name_of(reading)
            labels = (
                reading.uuid,
                GPU_TYPE,
                name,
                "NVIDIA",
                reading.model or "",
                reading.parent_uuid or "",
            )
            values[SeriesGroup(TASKS, (*labels, "general"))] = device.values(_OF_TASKS)
            values[SeriesGroup(BOARDS, labels)] = device.values(_OF_BOARDS)
            if device.tells_memory:
                values[SeriesGroup(MEMORIES, labels)] = device.values(_OF_MEMORIES)
            sensor = SeriesGroup(SENSORS, (reading.uuid, name, "GPU_DIE"))
            values[sensor] = device.values(_OF_SENSORS)
        return values


def _name_of(reading: GpuReading) -> str:
    """Return a name for people: the device's file and, of an instance, its numbers."""
    name = f"nvidia{reading.index}"
    if reading.parent_uuid is None:
        return name
    return f"{name}/gi{reading.gpu_instance}/ci{reading.compute_instance}"
