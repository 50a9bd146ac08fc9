"""The generated parts of docs/reference/series.md and docs/reference/alerts.md.

The series are those of the sinks' families; the alerts are those of the shipped rules, so a rule's
annotations are written once. The pages around the generated parts are written by hand.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES, Family
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.usage import COUNTERS
from gpuledger_agent.exposition.dcgm_fields import default_counters
from tests.docs_gen.markdown import code, put_between_marks, table

_RULES: Final = Path(__file__).parents[2] / "k8s" / "chart" / "rules"
ALERT_RULES: Final = _RULES / "gpuledger.rules.yaml"
DCGM_RULES: Final = _RULES / "gpuledger.dcgm.rules.yaml"

_SERIES_COLUMNS: Final = ("series", "type", "labels other than `cluster` and `node`", "meaning")
_DCGM_COLUMNS: Final = ("dcgm-exporter", "instead")
_ON_THE_AGENT: Final = "only on the agent's endpoint"
INSTEAD: Final[Mapping[str, str]] = {
    "DCGM_FI_DEV_MEMORY_TEMP": _ON_THE_AGENT,
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": code("gpuledger_gpu_pcie_replays_total"),
    "DCGM_FI_DEV_ENC_UTIL": code("gpuledger_gpu_encoder_utilization_ratio"),
    "DCGM_FI_DEV_DEC_UTIL": code("gpuledger_gpu_decoder_utilization_ratio"),
    "DCGM_FI_DEV_XID_ERRORS": code("gpuledger_gpu_xid_errors_total"),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": code('gpuledger_gpu_link_bytes_total{link="nvlink"}'),
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": _ON_THE_AGENT,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": code(
        'gpuledger_gpu_remapped_rows{cause="uncorrectable"}'
    ),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": code(
        'gpuledger_gpu_remapped_rows{cause="correctable"}'
    ),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": code("gpuledger_gpu_remapped_rows_failed"),
    "DCGM_FI_DRIVER_VERSION": _ON_THE_AGENT,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": f"approximately {code('DCGM_FI_DEV_GPU_UTIL / 100')}",
}
"""A replacement for each default field of dcgm-exporter that no recording rule records."""

_ALERT_COLUMNS: Final = ("alert", "severity", "for")
_GROUPS: Final = {
    "gpuledger": "Alerts on gpuledger itself",
    "gpuledger-scrapes": "Alerts on missing components",
    "gpuledger-gpus": "Alerts on GPUs",
}
_NAMES: Final = ("gpuledger", "podwatch")
"""Programs, whose names begin with a small letter in a sentence, too."""
_SOURCE: Final = re.compile(
    r"^\{\{ \$labels\.instance \}\}(?:, check \{\{ \$labels\.check \}\})?: "
)
_TEMPLATE: Final = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")
_CODE: Final = re.compile(
    r"(?<![\w/.`])(?:/readyz|/proc|\w+(?:\.\w+)*_\w+(?:\.\w+)*|hostPID(?:: true)?)(?!\w)"
)
_LINK: Final = re.compile(r"\(docs/((?:[\w-]+/)*([\w-]+)\.md(?:#[\w-]+)?)\)")


def series_page(standing: str) -> str:
    """Return the page with new tables; raises `UserError` if the marks of one are missing."""
    tables = {
        "series": _series(FAMILIES),
        "counters": _series([COUNTERS]),
        "health": _series([*HEALTH_FAMILIES, *INCIDENT_FAMILIES]),
        "dcgm": _unrecorded_fields(),
    }
    for name, lines in tables.items():
        standing = put_between_marks(standing, name, lines)
    return standing


def alerts_page(standing: str) -> str:
    """Return the page with the shipped rules; raises `UserError` if its marks are missing."""
    rules = rules_by_group()
    every = [rule for group in rules.values() for rule in group]
    listed = table(_ALERT_COLUMNS, map(_alert_row, every))
    described = (line for group, title in _GROUPS.items() for line in _section(title, rules[group]))
    return put_between_marks(
        put_between_marks(standing, "alerts", listed), "rules", list(described)[:-1]
    )


def rules_by_group() -> dict[str, list[dict[str, Any]]]:
    """Return the shipped alerting rules by the name of their group."""
    groups = yaml.safe_load(ALERT_RULES.read_text(encoding="utf-8"))["groups"]
    return {group["name"]: group["rules"] for group in groups}


def recorded_fields() -> set[str]:
    """Return the names of DCGM's fields that the shipped recording rules record."""
    groups = yaml.safe_load(DCGM_RULES.read_text(encoding="utf-8"))["groups"]
    records = (rule["record"] for group in groups for rule in group["rules"])
    return {name for name in records if name.startswith("DCGM_")}


def _series(families: Iterable[Family]) -> Iterator[str]:
    rows = (
        (code(metric.name), metric.kind, code(*family.labels), metric.help)
        for family in families
        for metric in family.metrics
    )
    return table(_SERIES_COLUMNS, rows)


def _unrecorded_fields() -> Iterator[str]:
    recorded = recorded_fields()
    names = [one.field.old for one in default_counters() if one.field.old not in recorded]
    return table(_DCGM_COLUMNS, [(code(name), INSTEAD[name]) for name in names])


def _alert_row(rule: Mapping[str, Any]) -> tuple[str, ...]:
    name = rule["alert"]
    return f"[{name}](#{name.lower()})", rule["labels"]["severity"], rule.get("for", "")


def _section(title: str, rules: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    for rule in rules:
        wait = f" The condition must hold for {rule['for']}." if "for" in rule else ""
        keep = rule.get("keep_firing_for")
        stay = f" The alert stays active for {keep} after the condition ends." if keep else ""
        summary, description = (rule["annotations"][name] for name in ("summary", "description"))
        yield from (f"### {rule['alert']}", "")
        yield from (f"Severity: {rule['labels']['severity']}.{wait}{stay}", "")
        yield from ("```promql", rule["expr"], "```", "")
        yield from (f"- **Meaning:** {shown(_SOURCE.sub('', summary))}.",)
        yield from (f"- **First action:** {shown(description)}", "")


def shown(annotation: str) -> str:
    """Return an annotation in Markdown: names as code, labels by their names, links that work."""
    text = _TEMPLATE.sub(r"`\1`", annotation)
    parts = re.split(r"(\(docs/[^)]*\)|`[^`]*`)", text)
    shown = (part if place % 2 else _CODE.sub(r"`\g<0>`", part) for place, part in enumerate(parts))
    text = _LINK.sub(r"([\2](../\1))", "".join(shown))
    return text if text.startswith(_NAMES) else text[:1].upper() + text[1:]
