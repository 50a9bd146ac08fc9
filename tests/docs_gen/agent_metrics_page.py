"""reference/agent-metrics.md: the GPU metrics on the agent's /metrics, by DCGM's and own names."""

from typing import Final

from gpuledger_agent.exposition.dcgm_fields import all_fields
from gpuledger_agent.exposition.families import (
    INFO_FAMILIES,
    LABELS,
    PROCESS_FAMILIES,
    InfoFamily,
    native_families,
)
from tests.docs_gen.markdown import code, head, table

_HEAD: Final = head(
    "GPU metrics of the agent",
    audience="SRE",
    about="""\
GPU metrics on the agent's `/metrics`, by the names of DCGM and by those of gpuledger. Use this page
to choose counters and to write queries.""",
)
_DCGM: Final = """
## DCGM's names

These fields of DCGM can be in a list of counters, by either name, as `gauge`, `counter` or `label`.
Fields that are on are exposed without a list. "=" means that DCGM 4.6 kept the name. The value is
the one in the record, in the given unit. Every series has the labels `gpu`, `UUID`, `pci_bus_id`,
`device`, `modelName` and `hostname`. Series of MIG instances also have `GPU_I_PROFILE` and
`GPU_I_ID`. The fields of type `label` follow, then `container`, `namespace` and `pod`.

Other fields of DCGM in a list are skipped with a warning.
"""
_OWN: Final = """
## gpuledger's names

Values are in base units, and every series also has the label `node`. All metrics of gpuledger,
including those of the remote-write sink, identify a GPU by `gpu_uuid` and `gpu_index`. Metrics with
the profile "lean" are exposed by default, those with "full" only with `exposition.profile: full`.
"""
_PROCESSES: Final = """
## Processes

Exposed only with `--process-series`, for at most `exposition.max_process_series` processes.
"""
_UNITS: Final = {"": "as it is", "text": "text", "multi_series": "several series"}
_INFO_COLUMNS: Final = ("metric", "type", "labels", "help")
_FIELD_COLUMNS: Final = ("field", "since DCGM 4.6", "type", "on", "help", "value", "unit")
_COLUMNS: Final = ("metric", "type", "labels", "profile", "help")


def agent_metrics_page() -> str:
    """Return the page, in Markdown."""
    fields = [
        (
            code(field.old),
            "=" if field.new == field.old else code(field.new),
            field.kind,
            "on" if field.is_default else "",
            field.help,
            code(field.path),
            _UNITS.get(field.unit, field.unit),
        )
        for field in all_fields()
    ]
    own = [(*_info_row(family)[:3], family.profile, family.help) for family in INFO_FAMILIES]
    own += [
        (
            code(family.name),
            family.kind,
            code(*LABELS, *family.label_names),
            family.profile,
            family.help,
        )
        for family in native_families()
    ]
    lines = [
        *_HEAD.splitlines(),
        *_DCGM.splitlines(),
        "",
        *table(_FIELD_COLUMNS, fields),
        *_OWN.splitlines(),
        "",
        *table(_COLUMNS, own),
        *_PROCESSES.splitlines(),
        "",
        *table(_INFO_COLUMNS, map(_info_row, PROCESS_FAMILIES)),
    ]
    return "\n".join([*lines, ""])


def _info_row(family: InfoFamily) -> tuple[str, ...]:
    return code(family.name), family.kind, code(*family.label_names), family.help
