"""All names that users write or read use the glossary's terms.

Fields, columns, metrics, labels and their values, alerts, checks, log events and their keys,
settings, command options, panel titles and special values.
"""

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import chain
from typing import Any

import msgspec
import pytest
import yaml

from gpuledger.settings import KafkaSettings
from gpuledger.store import schema, usage_schema
from gpuledger.store.bill_table import BILL_LINES
from gpuledger.store.views import READABLE
from gpuledger_agent.settings import AgentSettings
from gpuledger_cli.__main__ import main
from gpuledger_cli.demo.run_bill import OwnerCost, RunBill
from gpuledger_cli.demo.summary import IncidentLine, PodLine, StoreLine, Summary
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_reports.presenting.focus import COLUMNS
from gpuledger_reports.pricing import tenants
from gpuledger_reports.pricing.policy import IDLE_KINDS, OWN_COLUMNS
from gpuledger_reports.settings import ReportsSettings
from gpuledger_sinks.settings import SinkSettings
from tests.lint.prose import ROOT
from tests.lint.test_language import METRIC_PAGES, RULES, words_of
from tests.lint.test_log_lines import LINES

ROW = re.compile(r"^\| (?P<write>[^|]+) \| (?P<refused>[^|]+) \|$", re.MULTILINE)
SETTINGS = (
    AgentSettings,
    JoinSettings,
    KafkaSettings,
    PodwatchSettings,
    ReportsSettings,
    SinkSettings,
)
# The object of `gpuledger demo --format json`.
DEMO_SUMMARY = (IncidentLine, OwnerCost, PodLine, RunBill, StoreLine, Summary)
SERIES_PAGES = (ROOT / "docs/guides/prometheus.md", ROOT / "docs/reference/series.md")
DASHBOARD = ROOT / "k8s/chart/dashboards/gpuledger.json"
OPENAPI = ROOT / "reports/gpuledger_reports/api/openapi.yaml"
# Names of other projects that contain a rejected word.
OF_OTHERS = {"board_limit_ns_total": "NVML's violation of the board's power limit"}


def table() -> list[re.Match[str]]:
    """Return the rows of the table of public names, including its head."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("### Public names")[2]
    return list(ROW.finditer(section.partition("\n#")[0]))


def refused_words() -> list[str]:
    return sorted(
        word.strip() for row in table()[1:] for word in row["refused"].split(",") if word.strip()
    )


@cache
def public_names() -> frozenset[str]:
    """Return all names that users write in queries, files and programs."""
    found = chain(
        _of_schemas(),
        _of_tables(),
        _of_pages(),
        _of_openapi(),
        _of_commands(),
        (panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"]),
        (column.name for column in COLUMNS if column.name.startswith("x_")),
        chain.from_iterable(map(_of_settings, SETTINGS)),
        (name for line in LINES for name in (line.event, *line.keys)),
        (field for part in DEMO_SUMMARY for field in part.__struct_fields__),
        (
            value
            for name, value in vars(tenants).items()
            if name.isupper() and str(value)[:2] == "__"
        ),
        OWN_COLUMNS,
        IDLE_KINDS,
    )
    return frozenset(found) - OF_OTHERS.keys()


def _of_schemas() -> Iterator[str]:
    for file in (ROOT / "docs/schemas").glob("*.json"):
        yield from _properties(json.loads(file.read_text()))


def _properties(part: Any) -> Iterator[str]:  # noqa: ANN401  # any JSON
    if isinstance(part, dict):
        yield from part.get("properties", {})
        yield from (one.get("title", "") for one in part.get("prefixItems", ()))
    for inner in (
        part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    ):
        yield from _properties(inner)


def _of_tables() -> Iterator[str]:
    for module in (schema, usage_schema):
        for one in vars(module).values():
            if isinstance(one, schema.TableSchema):
                yield one.name
                yield from (column.name for column in one.columns)
    yield from (column.name for column in BILL_LINES.columns)
    yield from READABLE


def _of_pages() -> Iterator[str]:
    yield from re.findall(r"^ *- alert: (\w+)$", RULES.read_text(), re.MULTILINE)
    for page in (*METRIC_PAGES, *SERIES_PAGES):
        yield from re.findall(r"\bgpuledger_\w+", page.read_text())
    for page in METRIC_PAGES:
        for labels, text in re.findall(
            r"^\| `\w+` \| \w+ \| ([^|]+) \|(.+)\|$", page.read_text(), re.MULTILINE
        ):
            yield from re.findall(r"\w+", labels)
            yield from re.findall(r"`(\w+)`", text)  # values of labels
    checks = (ROOT / "docs/reference/checks.md").read_text().partition("| component | check |")[2]
    for check in re.findall(r"^\| [^|]+ \| ([^|]+) \|", checks.partition("\n\n")[0], re.MULTILINE):
        yield from re.findall(r"\w+", check)


def _of_openapi() -> Iterator[str]:
    api = yaml.safe_load(OPENAPI.read_text())
    yield from _properties(api)
    yield from re.findall(r"^ *(?:- |- \{)name: (\w+)", OPENAPI.read_text(), re.MULTILINE)


def _of_commands() -> Iterator[str]:
    with redirect_stdout(StringIO()) as script:
        main(["completion", "bash"])
    yield from re.findall(r"(?<=--)[a-z][a-z-]+", script.getvalue())


def _of_settings(settings: Any) -> Iterator[str]:  # noqa: ANN401  # any settings class
    for field in msgspec.structs.fields(settings):
        yield field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _of_settings(field.type)


def test_public_names_of_every_kind_are_found() -> None:
    assert {
        "allocated_ns",  # a record field, and a column
        "measured_busy_ns",  # only a column
        "gpuledger_agent_samples_total",
        "gpuledger_gpu_allocated_seconds_total",
        "GpuledgerSinkLagging",
        "sampling_interval_seconds",
        "directory",  # a setting, a label, and a key of log lines
        "samples_lost",  # a log event
        "samples",  # a check, and a field of the demo's summary
        "pod_labels",  # only a check
        "owner_kind",  # a label
        "__unallocated__",
        "unused_cost",
        "unidentified",  # a value of a label
        "x_IdleKind",  # a column of FOCUS
        "gpuEfficiency",  # a field of the reports API
        "bootstrap-servers",  # an option of commands
        "GPUs allocated, by pod",  # the title of a panel
    } <= public_names()
    assert {"held", "tick"} <= {*refused_words()}


@pytest.mark.parametrize("word", refused_words())
def test_no_public_name_has_a_word_that_the_glossary_rejects(word: str) -> None:
    forms = {f" {word} ", f" {word}s "}
    words = {name: words_of(re.sub(r"\W+", "_", name)) for name in public_names()}
    assert not [name for name in words if any(form in words[name] for form in forms)]
