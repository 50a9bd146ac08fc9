"""Built-in prices match whole words of products, and OpenCost's clients get what they request."""

import asyncio
import json
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest

from gpuledger_reports.pricing.policy_file import DEFAULT_FILE, parse_policy
from gpuledger_reports.pricing.rates import DeviceTraits, PriceBook
from tests.unit.reports.api.report_requests import PRICES, InlinePages, settings_for, small_store
from tests.unit.reports.stores import allocated, inventory_row, pod_row, write_store

WINDOW: Final = "2026-10-01T00:00:00Z,2026-10-01T23:59:59Z"
DAY: Final = "2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"


def price_of(model: str) -> str | None:
    """Return the name of the built-in price of a model."""
    book = PriceBook(parse_policy(DEFAULT_FILE.read_text()))
    price = book.rate_of(DeviceTraits("c", "n", model), date(2026, 10, 1)).price
    return price.name if price else None


@pytest.mark.parametrize(
    ("model", "right"),
    [
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA B300 SXM6 AC", None),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A800-SXM4-80GB", None),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40S-48Q", None),
        ("GRID T4-16C", None),
        ("NVIDIA A100-1-10C", None),
    ],
)
def test_a_built_in_price_belongs_to_the_product_itself(model: str, right: str | None) -> None:
    """If it has none, the bill names it; the price of another product would go unnoticed."""
    assert price_of(model) == right


def answer(pages: InlinePages, path: str, **parameters: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the content of a response."""

    async def ask() -> tuple[int, dict[str, Any]]:
        async with pages.running():
            response = await pages.get(path, urlencode(parameters))
            return response.status, json.loads(response.body, parse_float=Decimal)

    return asyncio.run(ask())


@pytest.mark.parametrize("aggregate", ["namespace,pod,container", "namespace,pod"])
def test_the_request_of_opencosts_parquet_exporter_is_answered(
    tmp_path: Path, aggregate: str
) -> None:
    """This is its request with its default settings."""
    status, content = answer(
        InlinePages(small_store(tmp_path)),
        "/allocation/compute",
        window=WINDOW,
        includeIdle="false",
        idleByNode="false",
        includeProportionalAssetResourceCosts="false",
        format="json",
        step="1h",
        aggregate=aggregate,
    )
    assert status == 200, content
    assert content["data"]
    assert "includeProportionalAssetResourceCosts: has no effect here" in content["warnings"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> InlinePages:
    folder = tmp_path_factory.mktemp("labelled")
    labels = {"a": "trainer", "b": "server"}
    store = write_store(
        folder / "store",
        usage_hourly=[allocated(0, "a"), allocated(1, "b")],
        inventory=[inventory_row()],
        pods=[
            pod_row(name, labels=json.dumps({"app.kubernetes.io/name": value}))
            for name, value in labels.items()
        ],
    )
    prices = folder / "prices.yaml"
    prices.write_text(PRICES)
    return InlinePages(settings_for(store, prices=prices))


def costs(content: Mapping[str, Any]) -> list[Decimal]:
    return sorted(one["totalCost"] for each in content["data"] for one in each.values())


def named(content: Mapping[str, Any]) -> set[str]:
    return {name.partition("=")[2] or name for each in content["data"] for name in each}


def test_a_label_can_be_requested_by_its_own_name(labelled: InlinePages) -> None:
    _, content = answer(
        labelled, "/allocation", window=DAY, aggregate="label:app.kubernetes.io/name"
    )
    assert named(content) == {"trainer", "server"}


def test_a_label_can_be_requested_by_its_prometheus_name(labelled: InlinePages) -> None:
    _, content = answer(
        labelled, "/allocation", window=DAY, aggregate="label:app_kubernetes_io_name"
    )
    assert named(content) == {"trainer", "server"}


def test_a_filter_accepts_the_prometheus_name_of_a_label(labelled: InlinePages) -> None:
    _, content = answer(
        labelled,
        "/allocation",
        window=DAY,
        aggregate="namespace",
        filter='label[app_kubernetes_io_name]:"trainer"',
    )
    assert costs(content) == [7]


def test_a_response_warns_about_a_label_that_no_line_has(labelled: InlinePages) -> None:
    status, content = answer(labelled, "/allocation", window=DAY, aggregate="label:no-such-label")
    assert status == 200
    assert content["warnings"] == ["label:no-such-label: no allocation has a value"]


def test_a_set_without_tenants_does_not_hide_the_warning(labelled: InlinePages) -> None:
    days = "2026-09-30T00:00:00Z,2026-10-03T00:00:00Z"
    _, content = answer(
        labelled, "/allocation", window=days, step="1d", aggregate="label:no-such-label"
    )
    assert len(content["data"]) == 3
    assert content["warnings"] == ["label:no-such-label: no allocation has a value"]
