"""The table in docs/agent.md: the catalogue of what the agent reads of a GPU, and how it asks."""

from typing import Final

import pynvml

from agent.core.raw import CallGroup
from agent.gpu.nvidia.catalogue import (
    CATALOGUE,
    EACH_LINK,
    FieldValue,
    FunctionCall,
    MetricSpec,
    Source,
)
from cli.docs_gen.markdown import code, put_between_marks, table

_COLUMNS: Final = ("reading", "asked by", "driver's unit", "group", "since")
_FIELDS: Final = {
    getattr(pynvml, name): name for name in dir(pynvml) if name.startswith("NVML_FI_DEV_")
}
_METRICS: Final = {
    getattr(pynvml, name): name
    for name in dir(pynvml)
    if name.startswith("NVML_GPM_METRIC_") and name != "NVML_GPM_METRICS_GET_VERSION"
}


def page(standing: str) -> str:
    """Return the page with its table renewed, raises `UserError` where that has no place."""
    rows = [_row(group, reading) for group, readings in CATALOGUE.items() for reading in readings]
    return put_between_marks(standing, "readings", table(_COLUMNS, rows))


def _row(group: CallGroup, reading: MetricSpec) -> list[str]:
    asked = ", else ".join(map(_describe, reading.sources))
    return [code(reading.name), asked, reading.unit.name, group.value, reading.since]


def _describe(question: Source) -> str:
    if isinstance(question, FunctionCall):
        part = f"[{question.part}]" if isinstance(question.part, int) else question.part
        dot = "." if isinstance(question.part, str) else ""
        return f"`{question.name}{_arguments(question)}{dot}{part if part is not None else ''}`"
    if isinstance(question, FieldValue):
        links = " of each link" if question.link == EACH_LINK else ""
        return f"field {question.number} `{_FIELDS[question.number]}`{links}"
    last = f" to {question.number + question.count - 1}" if question.count else ""
    return f"metric {question.number}{last} `{_METRICS[question.number]}`"


def _arguments(call: FunctionCall) -> str:
    # A struct's version stands in the upper byte, its size below.
    given = [str(one) if one < 1 << 16 else f"v{one >> 24}" for one in call.arguments]
    return f"({', '.join(given)})" if given else ""
