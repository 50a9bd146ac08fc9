"""Bills as HTML: nothing is loaded, no tenant's name is executed, and tables are exact."""

import re
from base64 import b64encode
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typing_extensions import override

from gpuledger_reports.presenting.bill_charts import printable
from gpuledger_reports.presenting.bill_html import as_html
from gpuledger_reports.pricing.billing import Bill, BillMaker
from gpuledger_reports.pricing.closing import (
    ChangeSinceClose,
    change_since_close,
    close,
    closed_lines,
    standing_bill,
)
from gpuledger_reports.pricing.money import rounded
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.pricing.rows import row_of
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    allocated,
    inventory_row,
    pod_row,
    used,
    write_store,
)

SEVEN = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"
BUDGETS = (
    "budgets: [{name: all of <b>ns</b>, amount: 10, from: 2026-10-01, to: 2026-10-04,"
    " match: {namespace: ns}}]\n"
)
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=http://x.example/ onerror=alert(1)>',
    "</style></script><base href=//x.example>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "a\x01b\u202ec&lt;",
)
VOID = {"meta", "input"}


class PageReader(HTMLParser):
    """The content of a page: its elements, and the texts in some of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data))

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def make(
    store: str,
    policy: str = SEVEN,
    *,
    by: Sequence[str] = ("namespace",),
    since: int = 0,
    hours: int = 72,
) -> Bill:
    """Return the bill of the hours of the first days, starting at one of them."""
    read = ReadPolicy(parse_policy(policy), "0" * 64, "test")
    maker = BillMaker(UsageReader(store), read, by=by)
    window = Window(BEGIN_US + since * HOUR_US, BEGIN_US + hours * HOUR_US)
    return maker.make(window, with_days=True)


def page_of(bill: Bill) -> str:
    return as_html(bill, closed=[], arguments=["--store", "s"])


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Three days of tenants with arbitrary names, idle time, and a GPU without data."""
    rows = [
        row
        for number, name in enumerate((*HOSTILE, "ns"))
        for row in (
            allocated(number * 12, f"p{number}", allocated_namespace=name, busy_ns=HOUR_NS // 3),
            used(number * 12, f"p{number}", HOUR_NS * 2 // 3, namespace=name),
        )
    ]
    return write_store(
        tmp_path / "store",
        usage_hourly=[*rows, allocated(71, None)],
        inventory=[inventory_row(), inventory_row(hour=40), inventory_row("GPU-b", hour=40)],
    )


def test_a_page_refers_to_nothing_outside_itself(store: str) -> None:
    page = page_of(make(store, SEVEN + BUDGETS))
    read = PageReader(page)
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}
    named = {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use", "a"}
    assert [pair for pair in read.elements if loading & pair[1].keys()] == []
    assert [tag for tag, _ in read.elements if tag in named] == ["script"]
    for text in read.inside("style"):
        assert "url(" not in text
        assert "@import" not in text


def test_the_security_policy_of_a_page_allows_only_its_own_style_and_script(store: str) -> None:
    read = PageReader(page_of(make(store)))
    (policy,) = (
        attributes["content"]
        for tag, attributes in read.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    hashes = {
        kind: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        for kind in ("style", "script")
        for text in read.inside(kind)
    }
    assert dict(part.split(" ", 1) for part in policy.split("; ")) == {
        "default-src": "'none'",
        "style-src": hashes["style"],
        "script-src": hashes["script"],
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    # The page has nothing that the policy forbids: attributes with scripts or styles.
    assert [
        name
        for _, attributes in read.elements
        for name in attributes
        if name == "style" or name.startswith("on")
    ] == []


def test_the_name_of_a_tenant_is_always_text(store: str) -> None:
    bill = make(store, SEVEN + BUDGETS)
    read = PageReader(page_of(bill))
    kinds = {tag for tag, _ in read.elements}
    assert kinds & {"img", "base", "b"} == {"b"}
    names = read.inside("bdi")
    assert [name for name in HOSTILE if printable(name) not in names] == []
    assert "all of <b>ns</b>" in names
    # The drawings shorten names, and show them in full on hover.
    message = read.inside("title")
    assert any(HOSTILE[0] in text for text in message)
    assert "\x01" not in page_of(bill)


def test_the_table_has_each_line_with_its_exact_cost(store: str) -> None:
    bill = make(store)
    page = page_of(bill)
    rows = re.findall(
        r'<tr(?: class="idle")?>(?:(?!</tr>).)*?class="line">\w+<.*?</tr>', page, re.DOTALL
    )
    shown = {}
    for row in rows:
        (line,) = re.findall(r'class="line">(\w+)<', row)
        shown[line] = [Decimal(value) for value in re.findall(r'<data value="([^"]+)">', row)]
    columns = ("cost", "unused_cost", "allocated_gpu_seconds", "used_gpu_seconds")
    assert shown == {
        line.id: [
            *(row_of(bill, line)[name] for name in columns),
            rounded(
                Fraction(line.used, line.allocated) if line.allocated else Fraction(-1), digits=6
            ),
            row_of(bill, line)["billed_gpu_seconds"],
        ]
        for line in bill.lines
    }
    assert sum(amounts[0] for amounts in shown.values()) == bill.asset_cost
    assert f"Lines {bill.line_cost:,f} <b>=</b> GPUs {bill.asset_cost:,f} USD" in page


def test_the_same_bill_is_the_same_page_byte_for_byte(store: str) -> None:
    assert page_of(make(store, SEVEN + BUDGETS)) == page_of(make(store, SEVEN + BUDGETS))


def test_days_sum_exactly_to_the_cost_of_the_gpus(store: str) -> None:
    prices = "prices: [{name: h100, model: H100, purchase: {capital: 25000, lifetime_hours: 7}}]\n"
    bill = make(store, prices)
    assert [day.begin_us for day in bill.days] == [
        BEGIN_US + number * 24 * HOUR_US for number in range(3)
    ]
    assert sum(cost for day in bill.days for cost in day.costs.values()) == bill.exact_asset_cost
    # Two tenants a day, and from 16:00 of the second day on a second GPU without data.
    hour = bill.days[0].costs[None] / 2
    assert [day.costs["no_data"] / hour for day in bill.days] == [22, 22 + 8, 45]
    assert [day.costs.get("idle", 0) / hour for day in bill.days] == [0, 0, 1]


def test_many_tenants_are_one_bar_in_the_chart_and_one_row_each_in_the_table(
    tmp_path: Path,
) -> None:
    usage = [
        allocated(
            hour, f"p{hour}-{gpu}", gpu=f"GPU-{gpu}", allocated_namespace=f"team-{hour}-{gpu}"
        )
        for hour in range(5)
        for gpu in range(8)
    ]
    bill = make(write_store(tmp_path, usage_hourly=usage), hours=5)
    page = page_of(bill)
    assert "20 others" in page
    names = PageReader(page).inside("bdi")
    assert len([name for name in names if name.startswith("team-")]) == 40


def test_warnings_before_payment_are_at_the_top(store: str) -> None:
    bill = make(store, "prices: []", hours=96)
    page = page_of(bill)
    assert "Usage is complete up to 2026-10-04T00:00:00Z only; the bill goes no further." in page
    assert "No price for <bdi>H100</bdi>" in page
    assert '<span class="state">open</span>' in page


def test_a_large_part_without_data_is_shown_with_its_cost(store: str) -> None:
    bill = make(store)
    (no_data,) = (line for line in bill.lines if line.idle_kind == "no_data")
    page = page_of(bill)
    assert f"{no_data.cost:,f} USD are for time without data" in page
    lenient = page_of(make(store, SEVEN + "close: {min_data_coverage_ratio: 0}"))
    assert "for time without data" not in lenient


def test_gpus_that_the_inventory_lacks_are_counted(tmp_path: Path) -> None:
    bill = make(write_store(tmp_path, usage_hourly=[allocated(0, "a")]), hours=1)
    assert "The inventory lacks 1 GPU for 1.0 GPU-hours with samples" in page_of(bill)


def test_the_summary_names_the_largest_kind_of_idle(store: str) -> None:
    page = page_of(make(store))
    words = re.findall(r'class="tile"><span>([^<]+)</span>', page)
    assert words[1:3] == ["unused cost", "no data"]


@pytest.mark.parametrize(
    ("price", "labels"), [("0.005", {"0.1", "0.2"}), ("7", {"100", "300"}), ("7000", {"100,000"})]
)
def test_the_costs_of_days_are_plain_numbers_in_the_currency(
    store: str, price: str, labels: set[str]
) -> None:
    page = page_of(make(store, SEVEN.replace("7}", f"{price}}}")))
    chart = page[page.index("Cost by day, in USD") : page.index("Table of days")]
    shown = set(re.findall(r">([\d.,]+[a-zµ]?)</text>", chart))
    assert labels <= shown
    assert not any(label[-1].isalpha() for label in shown)


def test_names_are_shown_in_full_if_there_is_room(tmp_path: Path) -> None:
    name = "training-run-0042-worker-0-a"
    rows = [allocated(0, "a", allocated_namespace=name)]
    page = page_of(make(write_store(tmp_path, usage_hourly=rows), hours=1))
    assert f">{name}</text>" in page


def state_in(page: str) -> str:
    (state,) = re.findall(r'<span class="state">([^<]*)</span>', page)
    return str(state)


def test_the_page_of_a_closed_bill_shows_its_state_and_no_warning(store: str) -> None:
    bill = make(store, SEVEN)
    close(bill, store)
    closed = closed_lines(store, bill.window, bill.by)
    standing = standing_bill(closed, window=bill.window, by=bill.by, policy=bill.policy.policy)
    page = as_html(standing, closed=closed, arguments=[])
    assert state_in(page) == "closed as revision 1"
    assert "is not what was closed" not in page


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        pytest.param(SEVEN, "would cost the same now", id="the same price"),
        pytest.param(SEVEN.replace("7}", "8}"), "USD more since, in 8 lines", id="another price"),
        pytest.param(f"currency: EUR\n{SEVEN}", "revision 1 is in USD", id="another currency"),
    ],
)
def test_a_page_of_a_recalculated_closed_period_shows_the_changes(
    store: str, policy: str, message: str
) -> None:
    bill = make(store, SEVEN)
    close(bill, store)
    closed = closed_lines(store, bill.window, bill.by)
    page = as_html(make(store, policy), closed=closed, arguments=[])
    assert state_in(page) == "provisional"
    assert "Check before you pay" in page
    assert message in page


def test_a_move_between_lines_since_the_close_is_a_change(tmp_path: Path) -> None:
    late = [
        allocated(hour, None, allocated_pod_uid="uid-x", allocated_pod_state="pending")
        for hour in range(72)
    ]
    store = write_store(tmp_path, usage_hourly=late, inventory=[inventory_row()])
    bill = make(store, SEVEN)
    close(bill, store)
    write_store(tmp_path, pods=[pod_row("x", namespace="late")])
    again = make(store, SEVEN)
    closed = closed_lines(store, bill.window, bill.by)
    assert change_since_close(again, closed) == ChangeSinceClose(
        revision=1, other_currency=None, more=Decimal("0.00"), line_count=2
    )
    assert "0.00 USD more since, in 2 lines" in as_html(again, closed=closed, arguments=[])


def test_budgets_show_the_remaining_amount_and_a_forecast(store: str) -> None:
    page = page_of(make(store, SEVEN + BUDGETS, hours=24 * 3))
    row = page[page.index("<bdi>all of &lt;b&gt;") :]
    values = re.findall(r'<data value="([^"]+)">', row)[:4]
    assert [Decimal(value) for value in values] == [10, 7, 3, 7]


def test_the_page_of_a_period_without_usage_reports_this(store: str) -> None:
    read = ReadPolicy(parse_policy(SEVEN), "0" * 64, "test")
    later = Window(BEGIN_US + 2400 * HOUR_US, BEGIN_US + 2401 * HOUR_US)
    bill = BillMaker(UsageReader(store), read, by=["namespace"]).make(later, with_days=True)
    assert "nothing to bill" in page_of(bill)


def test_every_colour_is_defined_for_light_dark_and_print(store: str) -> None:
    page = page_of(make(store, SEVEN + BUDGETS))
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    assert len(blocks) == 3
    wanted = set(re.findall(r"var\((--[\w-]+)\)", page))
    for block in blocks:
        assert wanted - set(re.findall(r"(--[\w-]+):", block)) == set()
