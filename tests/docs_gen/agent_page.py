"""The tables in docs/reference/agent.md: readings, with NVML calls and units, and incidents."""

from typing import Final

import pynvml

from gpuledger_agent.core.incidents import KIND_FACTS
from gpuledger_agent.gpu.nvidia.catalogue import (
    CATALOGUE,
    EACH_LINK,
    FieldValue,
    FunctionCall,
    Source,
)
from tests.docs_gen.markdown import code, put_between_marks, table

_INCIDENT_COLUMNS: Final = ("kind", "severity", "meaning", "action", "detected by")
_READING_COLUMNS: Final = ("reading", "NVML call", "driver's unit", "group", "since")
_NVML_FIELDS: Final = {
    getattr(pynvml, name): name for name in dir(pynvml) if name.startswith("NVML_FI_DEV_")
}
_GPM_METRICS: Final = {
    getattr(pynvml, name): name
    for name in dir(pynvml)
    if name.startswith("NVML_GPM_METRIC_") and name != "NVML_GPM_METRICS_GET_VERSION"
}


def agent_page(standing: str) -> str:
    """Return the page with new tables; raises `UserError` if a table's marks are missing."""
    incidents = [
        (
            code(kind),
            code(facts.severity.value),
            facts.message,
            code(facts.action) if facts.action else "",
            facts.sources,
        )
        for kind, facts in KIND_FACTS.items()
    ]
    readings = [
        [
            code(reading.name),
            ", else ".join(map(_describe_source, reading.sources)),
            reading.unit.name,
            group.value,
            reading.architectures,
        ]
        for group, readings in CATALOGUE.items()
        for reading in readings
    ]
    page = put_between_marks(standing, "readings", table(_READING_COLUMNS, readings))
    return put_between_marks(page, "incidents", table(_INCIDENT_COLUMNS, incidents))


def _describe_source(source: Source) -> str:
    """Return the NVML call of a reading, in the driver's names."""
    if isinstance(source, FunctionCall):
        part = f"[{source.part}]" if isinstance(source.part, int) else source.part
        dot = "." if isinstance(source.part, str) else ""
        # The upper byte of a struct's argument is its version; the rest is its size.
        passed = [
            str(value) if value < 1 << 16 else f"v{value >> 24}" for value in source.arguments
        ]
        arguments = f"({', '.join(passed)})" if passed else ""
        return f"`{source.name}{arguments}{dot}{part if part is not None else ''}`"
    if isinstance(source, FieldValue):
        links = " of each link" if source.link == EACH_LINK else ""
        # The binding has the names of the newest drivers.
        is_past = source.drivers and source.drivers.last
        name = "" if is_past else f" `{_NVML_FIELDS[source.number]}`"
        last = f" to {source.number + source.count - 1}" if source.count else ""
        drivers = f" (drivers {source.drivers})" if source.drivers else ""
        return f"field {source.number}{last}{name}{links}{drivers}"
    last = f" to {source.numbers[-1]}" if source.count else ""
    links = ", one of each link" if source.is_by_link else ""
    return f"metric {source.number}{last} `{_GPM_METRICS[source.number]}`{links}"
