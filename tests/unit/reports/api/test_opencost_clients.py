"""Clients of OpenCost and Kubecost read from the reports API what they read from theirs."""

import asyncio
import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from gpuledger_reports.api.answering import AnswerSettings
from gpuledger_reports.pricing.policy_file import parse_policy
from tests.unit.reports.api.report_requests import InlinePages, small_store

FILE: Final = Path(__file__).parents[3] / "data" / "opencost-clients.yaml"
GUIDE: Final = Path(__file__).parents[4] / "docs" / "start" / "move-from-opencost.md"
REQUESTS: Final[list[dict[str, Any]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
EXPORTED: Final = """
cpuCoreHours cpuCoreRequestAverage cpuCoreUsageAverage cpuCores cpuCost cpuCostAdjustment
cpuEfficiency externalCost gpuCost gpuCostAdjustment gpuCount gpuHours loadBalancerCost
loadBalancerCostAdjustment minutes networkCost networkCostAdjustment networkCrossRegionCost
networkCrossZoneCost networkInternetCost networkReceiveBytes networkTransferBytes pvByteHours
pvBytes pvCost pvCostAdjustment ramByteHours ramByteRequestAverage ramByteUsageAverage ramBytes
ramCost ramCostAdjustment ramEfficiency sharedCost totalCost totalEfficiency
"""
"""The columns that the exporter converts to floats."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> AnswerSettings:
    return small_store(tmp_path_factory.mktemp("small"))


def content_of(store: AnswerSettings, request: str) -> dict[str, Any]:
    """Return the content of a response."""
    path, _, query = request.partition("?")
    pages = InlinePages(store)

    async def ask() -> dict[str, Any]:
        async with pages.running():
            response = await pages.get(path, query)
        content: dict[str, Any] = json.loads(response.body, parse_float=Decimal)
        assert (response.status, content["code"]) == (200, 200), content
        return content

    return asyncio.run(ask())


def efficiency_text(name: str, of_name: list[dict[str, Any]], *, set_count: int) -> str:
    """Return an allocation's efficiency as OpenCost's UI shows it."""
    if "__idle__" in name:
        return "—"
    # It weights the efficiencies of several sets by the costs of CPU and memory.
    of_cpu = any(one["cpuCost"] or one["ramCost"] for one in of_name)
    found = of_name[0]["totalEfficiency"] if set_count == 1 or of_cpu else Decimal(0)
    return f"{found * 100:.1f}%"


@pytest.mark.parametrize("row", REQUESTS, ids=lambda row: row["request"].partition("/")[2])
def test_a_client_reads_the_costs_the_warnings_and_the_suggestions(
    store: AnswerSettings, row: dict[str, Any]
) -> None:
    content = content_of(store, row["request"])
    if "values" in row:
        assert content["data"]["data"] == row["values"]
        return
    by_name = defaultdict(list)
    for each in content["data"]:
        for name, allocation in each.items():
            assert allocation["name"] == name
            assert allocation["window"]["start"] >= "2026-08-15T00:00:00Z"
            by_name[name].append(allocation)
    assert len(content["data"]) == row["sets"]
    assert {
        name: sum(one["totalCost"] for one in of_name) for name, of_name in by_name.items()
    } == row["costs"]
    warned = [text.partition(": ")[0] for text in content.get("warnings", ())]
    assert sorted(warned) == sorted(row.get("warns", []))
    for name, text in row.get("efficiency", {}).items():
        assert efficiency_text(name, by_name[name], set_count=row["sets"]) == text


@pytest.mark.parametrize(
    "request_", [row["request"] for row in REQUESTS if "exporter" in row["from"]]
)
def test_the_exporter_reads_a_number_in_each_of_its_columns(
    store: AnswerSettings, request_: str
) -> None:
    rows = [one for each in content_of(store, request_)["data"] for one in each.values()]
    assert rows
    assert {type(row[name]) for row in rows for name in EXPORTED.split()} <= {int, Decimal}


def test_the_guide_shows_the_answer_to_its_request(store: AnswerSettings, tmp_path: Path) -> None:
    """At its prices, and as its jq filter prints it."""
    page, prices = GUIDE.read_text(), tmp_path / "prices.yaml"
    prices.write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    store = replace(store, prices=str(prices))
    (request,) = re.findall(r"localhost:\$port(/allocation\?[^\"]+)", page)
    (of_namespaces,) = content_of(store, request)["data"]
    rows = [one for one in of_namespaces.values() if one["gpuCost"] > 0]

    assert sorted(re.findall(r"^9824\t(\w+)\t(\d+)\t([\d.]+)$", page, re.MULTILINE)) == sorted(
        (row["name"], f"{row['gpuHours'].normalize()}", f"{row['gpuCost'].normalize()}")
        for row in rows
    )


def test_the_guide_takes_over_both_gpu_prices() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    policy = parse_policy(text)

    assert [(one.capacity_type, one.per_gpu_hour) for one in policy.prices] == [
        ("spot", Decimal("0.40")),
        (None, Decimal("0.95")),
    ]
