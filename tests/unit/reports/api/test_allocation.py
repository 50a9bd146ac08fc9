"""OpenCost's allocations of a bill: their names, costs and sums."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpuledger_reports.api.answering import AnswerSettings, answer_to
from gpuledger_reports.api.questions import AllocationQuestion, allocation_question
from tests.unit.reports.api.report_requests import DAY, NOW_SECONDS, small_store
from tests.unit.reports.stores import allocated, inventory_row, node_row, usage_row, write_store


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AnswerSettings:
    return small_store(tmp_path_factory.mktemp("small"))


def requested(query: str) -> AllocationQuestion:
    return allocation_question(f"window={DAY}&{query}", int(NOW_SECONDS * 10**6))


def sets(settings: AnswerSettings, query: str) -> list[dict[str, Any]]:
    answer = answer_to(requested(query), settings)
    content = json.loads(answer.body, parse_float=Decimal)
    assert answer.status == 200, content
    found: list[dict[str, Any]] = content["data"]
    return found


def costs(settings: AnswerSettings, query: str) -> dict[str, Decimal]:
    (only,) = sets(settings, query)
    assert all(name == one["name"] for name, one in only.items())
    return {name: one["totalCost"] for name, one in only.items()}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("aggregate=namespace", {"ns": 14, "other": 7}),
        ("aggregate=namespace&includeIdle=true", {"ns": 14, "other": 7, "__idle__": 7}),
        ("aggregate=cluster", {"prod": 21}),
        ("aggregate=node&idle=true", {"n": 14, "m": 7, "__idle__": 7}),
        ("aggregate=controller", {"job:train": 7, "__unallocated__": 14}),
        ("aggregate=controllerKind", {"job": 7, "__unallocated__": 14}),
        ("aggregate=deployment", {"__unallocated__": 21}),
        ("aggregate=job", {"train": 7, "__unallocated__": 14}),
        ("aggregate=label:app", {"app=x": 7, "__unallocated__": 14}),
        (
            "aggregate=namespace,label:app",
            {"ns/app=x": 7, "ns/__unallocated__": 7, "other/__unallocated__": 7},
        ),
        ("", {"prod/n/ns/a": 7, "prod/n/ns/b": 7, "prod/m/other/c": 7}),
        ("aggregate=model", {"H100": 21}),
    ],
)
def test_allocations_have_the_names_of_opencost(
    settings: AnswerSettings, query: str, expected: dict[str, int]
) -> None:
    assert costs(settings, query) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        # In proportion to their costs: 14 to 7.
        ("shareIdle=true", {"ns": "18.66667", "other": "9.33333"}),
        ("shareIdle=even", {"ns": "17.5", "other": "10.5"}),
        # The idle GPU is on node n, where the namespace other has none.
        ("shareIdle=true&idleByNode=true", {"ns": "21", "other": "7"}),
        ("includeIdle=true&splitIdle=true", {"ns": "14", "other": "7", "prod/__idle__": "7"}),
        (
            "includeIdle=true&splitIdle=true&idleByNode=true",
            {"ns": "14", "other": "7", "prod/n/__idle__": "7"},
        ),
        ("shareNamespaces=other", {"ns": "21"}),
        ("shareNamespaces=other&shareIdle=true", {"ns": "28"}),
        # Nobody is left to pay for them.
        ("shareNamespaces=other,ns", {"ns": "14", "other": "7"}),
        ("shareLabels=app:x", {"ns": "10.5", "other": "10.5"}),
    ],
)
def test_shared_costs_are_paid_by_the_others(
    settings: AnswerSettings, query: str, expected: dict[str, str]
) -> None:
    found = costs(settings, f"aggregate=namespace&{query}")
    assert found == {name: Decimal(cost) for name, cost in expected.items()}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("aggregate=team", {"ns": 14, "other": 7, "x": 7}),
        # The hours remain idle.
        ("aggregate=team&includeIdle=true", {"ns": 14, "other": 7, "x": 7, "__idle__": 0}),
        ("aggregate=team&shareIdle=true", {"ns": 14, "other": 7, "x": 7}),
        # The table is by team, and the request is not.
        ("aggregate=namespace&includeIdle=true", {"ns": 14, "other": 7, "__idle__": 7}),
    ],
)
def test_idle_cost_that_a_table_assigns_belongs_to_the_assignee(
    tmp_path: Path, query: str, expected: dict[str, int]
) -> None:
    found = small_store(tmp_path)
    assert found.prices
    with Path(found.prices).open("a") as prices:
        prices.write("dimensions: {team: [namespace]}\n")
        prices.write("idle: [{kind: idle, share: table, by: team, weights: {x: 1}}]\n")
    assert costs(found, query) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('filter=namespace:"ns"', {"ns": "14"}),
        ('filter=namespace!:"ns"&includeIdle=true', {"other": "7", "__idle__": "7"}),
        ('filter=namespace:"ns"&includeIdle=true', {"ns": "14"}),
        ('filter=label[app]:"x"', {"ns": "7"}),
        ('filter=label[app]:"__unallocated__"', {"ns": "7", "other": "7"}),
        ('filter=controllerKind:"job"%2BcontrollerName:"train"', {"ns": "7"}),
        ('filter=node:"m"&includeIdle=true', {"other": "7"}),
        ('filter=node:"n"&includeIdle=true', {"ns": "14", "__idle__": "7"}),
        # Others pay their part of shared costs, even if the filter excludes them.
        ('filter=namespace:"other"&shareIdle=true', {"other": "9.33333"}),
        ('filter=pod:"a"&shareIdle=true', {"ns": "9.33333"}),
        ('filter=namespace:"nobody"', {}),
        ('filter=label:app:"x"', {"ns": "7"}),
        ('filter=controller:"train"', {"ns": "7"}),
        ('filter=job:"train"', {"ns": "7"}),
        ('filter=deployment:"train"', {}),
        ('filter=deployment:"__unallocated__"', {"ns": "14", "other": "7"}),
        # A bill does not have these fields.
        ('filter=container:"main"', {}),
        ('filter=service!:"web"', {"ns": "14", "other": "7"}),
    ],
)
def test_a_filter_selects_allocations_by_their_common_properties(
    settings: AnswerSettings, query: str, expected: dict[str, str]
) -> None:
    found = costs(settings, f"aggregate=namespace&{query}")
    assert found == {name: Decimal(cost) for name, cost in expected.items()}


@pytest.mark.parametrize("share", ["", "&shareIdle=even", "&shareIdle=weighted&idleByNode=true"])
@pytest.mark.parametrize("aggregate", ["cluster", "pod", "label:app,controller"])
def test_costs_including_idle_sum_to_the_cost_of_the_gpus(
    settings: AnswerSettings, aggregate: str, share: str
) -> None:
    found = costs(settings, f"aggregate={aggregate}&includeIdle=true{share}")
    assert sum(found.values()) == 28


def test_an_allocation_has_its_allocated_and_used_hours_and_zero_for_other_resources(
    settings: AnswerSettings,
) -> None:
    (only,) = sets(settings, "aggregate=pod")
    one = only["a"]
    assert (one["gpuHours"], one["gpuCount"], one["minutes"]) == (1, Decimal("0.33333"), 180)
    assert one["gpuEfficiency"] == one["totalEfficiency"] == Decimal("0.5")
    assert one["gpuAllocation"] == {
        "gpuModel": "H100",
        "isGPUShared": None,
        "gpuUsageAverage": Decimal("0.16667"),
        "gpuRequestAverage": Decimal("0.33333"),
    }
    assert one["properties"] == {"cluster": "prod", "pod": "a"}
    assert one["window"] == {"start": "2026-10-01T00:00:00Z", "end": "2026-10-02T00:00:00Z"}
    assert {one[name] for name in ("cpuCost", "ramCost", "pvCost", "networkCost")} == {0}


def test_an_allocation_has_only_the_properties_that_all_its_parts_share(
    settings: AnswerSettings,
) -> None:
    (only,) = sets(settings, "aggregate=namespace,label:app&includeIdle=true&idleByNode=true")
    assert only["ns/app=x"]["properties"]["labels"] == {"app": "x"}
    assert only["ns/__unallocated__"]["properties"] == {"cluster": "prod", "namespace": "ns"}
    assert only["__idle__"]["properties"] == {"cluster": "prod", "node": "n"}


def test_each_step_has_its_own_set_which_is_empty_without_usage(
    settings: AnswerSettings,
) -> None:
    found = sets(settings, "aggregate=namespace&step=1h")
    assert [{name: one["totalCost"] for name, one in each.items()} for each in found[:4]] == [
        {"ns": 7},
        {"ns": 7},
        {"other": 7},
        {},
    ]
    assert len(found) == 24
    assert sets(settings, "aggregate=namespace&accumulate=hour") == found
    whole = sets(settings, "aggregate=namespace")
    assert sets(settings, "aggregate=namespace&step=1h&accumulate=true") == whole


def test_gpus_without_a_price_cause_a_warning(tmp_path: Path) -> None:
    reported = small_store(tmp_path)
    write_store(
        tmp_path / "store",
        usage_hourly=[usage_row(0, gpu="GPU-odd", model="Odd", allocated_ns=1, busy_ns=1)],
        inventory=[inventory_row("GPU-odd", model="Odd")],
    )
    answer = json.loads(answer_to(requested("aggregate=cluster"), reported).body)
    assert "Odd" in answer["warning"]


@pytest.mark.parametrize(
    ("window", "warning"),
    [
        ("2027-01-01T00:00:00Z,2027-01-03T00:00:00Z", "usage is complete up to 2026-10-01T03:00"),
        ("2026-09-01T00:00:00Z,2026-09-02T00:00:00Z", "usage begins at 2026-10-01T00:00:00Z"),
    ],
)
def test_a_window_without_usage_causes_a_warning(window: str, warning: str, tmp_path: Path) -> None:
    question = allocation_question(f"window={window}&step=1d", int(NOW_SECONDS * 10**6))
    (found,) = json.loads(answer_to(question, small_store(tmp_path)).body)["warnings"]
    assert found.startswith(f"nothing to bill: {warning}")


def test_gpus_that_the_inventory_lacks_cause_a_warning(tmp_path: Path) -> None:
    reported = small_store(tmp_path)
    write_store(tmp_path / "store", usage_hourly=[allocated(0, "d", gpu="GPU-d")])
    answer = json.loads(answer_to(requested("aggregate=cluster&step=1h"), reported).body)
    assert answer["warnings"] == [
        "GPUs that the inventory lacks: 1; only their samples are billed",
    ]


def test_idle_cost_of_an_unused_cluster_remains_on_its_line(tmp_path: Path) -> None:
    reported = small_store(tmp_path)
    write_store(
        tmp_path / "store",
        usage_hourly=[allocated(0, None, cluster="dev", gpu="GPU-d")],
        inventory=[inventory_row("GPU-d", cluster="dev", hour=2)],
        nodes=[node_row()],
    )
    found = costs(reported, "aggregate=namespace&shareIdle=true&splitIdle=true")
    assert found == {"ns": Decimal("18.66667"), "other": Decimal("9.33333"), "dev/__idle__": 14}


def test_the_name_of_an_unreadable_file_of_the_store_is_not_revealed(tmp_path: Path) -> None:
    found = small_store(tmp_path)
    for file in (Path(found.store_uri) / "usage_hourly").rglob("*.parquet"):
        file.unlink()
    answer = answer_to(requested("aggregate=namespace"), found)
    assert answer.status == 503
    assert b"cannot read the store" in answer.body
    assert str(tmp_path).encode() not in answer.body
