"""The file of prices and policies: each error is reported with its line, field and remedy."""

from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_reports.pricing.money import CURRENCIES, minor_digits, quantize_together, text_of
from gpuledger_reports.pricing.policy import BillPolicy, Scoped
from gpuledger_reports.pricing.policy_file import (
    DEFAULT_FILE,
    PolicyError,
    parse_policy,
    read_policy,
)
from gpuledger_reports.pricing.rates import DeviceTraits, PriceBook

EXAMPLE = Path(__file__).parents[3] / "deploy/bill/prices.yaml"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prices: [", ["line 1", "YAML"]),
        ("- 1", ["the file", "object"]),
        ("curency: USD", ["line 1: curency", "did you mean currency?"]),
        ("prices:\n- {name: a, modell: x, per_gpu_hour: 1}", ["line 2: prices[0].modell", "model"]),
        ("prices:\n- model: x\n", ["line 2: prices[0]", "name is missing"]),
        ("prices:\n- name: a\n  per_gpu_hour: dear", ["line 3: prices[0].per_gpu_hour", "number"]),
        (
            "prices:\n- name: a\n  per_gpu_hour: -1",
            ["line 3: prices[0].per_gpu_hour", "at least 0"],
        ),
        ("prices:\n- name: a\n  per_gpu_hour: .nan", ["line 3: prices[0].per_gpu_hour"]),
        ("prices:\n- name: a\n", ["line 2: prices[0]", "exactly one of"]),
        ("currency: USD\ncurrency: EUR", ["line 2", "also in line 1"]),
        ("currency: dollars", ["line 1: currency", "ISO 4217"]),
        (
            "prices:\n- name: a\n  per_gpu_hour: 1\n  currency: EUR",
            ["line 4: prices[0].currency", "exchange_rates"],
        ),
        (
            "prices:\n- {name: a, per_gpu_hour: 1}\n- {name: a, per_gpu_hour: 2}",
            ["line 3: prices[1].name", "duplicate"],
        ),
        (
            "prices:\n- {name: a, per_gpu_hour: 1, from: 2026-02-01, to: 2026-01-01}",
            ["line 2: prices[0]", "later day"],
        ),
        (
            'prices:\n- {name: a, per_gpu_hour: 1, product: " -"}',
            ["line 2: prices[0].product", "a word"],
        ),
        ("idle:\n- {kind: idle, share: table}", ["line 2: idle[0]", "`by` and `weights`"]),
        ("idle:\n- {kind: unalocated, share: even}", ["line 2: idle[0].kind"]),
        ("prices:\n- {name: a, per_gpu_hour: 1e999999999}", ["line 2: prices[0]", "18 digits"]),
        ("prices:\n- {name: a, per_gpu_hour: 1e-999999999}", ["line 2: prices[0]", "18 digits"]),
        ("basis:\n- {basis: blended}", ["line 2: basis[0]", "allocated_weight"]),
        ("basis:\n- {basis: blended}", ["basis blended needs allocated_weight"]),
        (
            "basis:\n- {basis: usage}",
            ["line 2: basis[0].basis", "allocated, used, greater", "mean used?"],
        ),
        (
            "prices:\n- {name: a, per_gpu_hour: 1,5}",
            ["line 2: prices[0].per_gpu_hour", "write 1.5"],
        ),
        ("prices:\n- {name: a, per_gpu_hour: 1,05}", ["write 1.05"]),
        ("prices:\n- name: a\n  per_gpu_hour: 1,5\n", ["line 3", "number 1,5", "write 1.5"]),
        ("prices:\n- name: a\n  per_gpu_hour: 1,234.50\n", ["line 3", "invalid number 1,234.50"]),
        (
            "budgets:\n- {name: a, amount: 1, to: 2026-13-01}",
            ["line 2: budgets[0].to", "2026-13-01"],
        ),
        ("teams:\n- {team: a, match: {pod: b}, from: soon}", ["soon is not a day", "2026-10-01"]),
        (
            "teams:\n- {team: a, match: {pod: b}, from: 2026-10-01 10:00:00}",
            ["line 2: teams[0].from", "is a time", "such as 2026-10-01"],
        ),
        ("teams:\n- {team: __idle__, match: {pod: b}}", ["line 2: teams[0].team", "reserved"]),
        ('teams:\n- {team: " ", match: {pod: b}}', ["line 2: teams[0].team", "a name"]),
        (
            "idle:\n- {kind: idle, share: table, by: team, weights: {a: 0}}",
            ["line 2: idle[0].weights", "above 0"],
        ),
        ("teams:\n- {team: 5, match: {pod: b}}", ["line 2: teams[0].team", "quotes"]),
        ("prices: {name: a}", ["line 1: prices", "list"]),
        ("010: a", ["line 1: 010: unknown field"]),
        ("5: [a]", ["line 1: 5: unknown field"]),
        ("close: 3", ["line 1: close", "object"]),
        ("prices:\n- name:\n  per_gpu_hour: 1", ["line 2: prices[0].name", "no value"]),
        ("basis:\n- {basis: used, match: {model: a}}", ["line 2: basis[0].match.model", "tenants"]),
        ("dimensions:\n  project: [lable:x]", ["line 2: dimensions.project[0]", "label:KEY"]),
        ("dimensions:\n  pod: [namespace]", ["line 2: dimensions.pod", "already"]),
        ("teams:\n- {team: a, match: {team: b}}", ["line 2: teams[0].match.team"]),
        ("exchange_rates:\n- {currency: EUR, rate: 0, from: 2026-01-01}", ["line 2", "`rate`"]),
        (
            "budgets:\n- {name: a, amount: 1, from: 2026-02-01, to: 2026-02-01}",
            ["line 2: budgets[0].to"],
        ),
    ],
)
def test_an_error_is_reported_with_its_line_its_field_and_the_remedy(
    text: str, parts: list[str]
) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy(text)
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize("number", ["010", "0x10", "1:30", "1_000", "0b11"])
def test_numbers_that_yaml_reads_differently_from_people_are_errors(number: str) -> None:
    with pytest.raises(PolicyError, match=f"line 1.*invalid number {number}"):
        parse_policy(f"prices: [{{name: a, per_gpu_hour: {number}}}]")


def test_every_digit_of_a_price_counts() -> None:
    digits = "0.12345678901234567891"
    (price,) = parse_policy(f"prices: [{{name: a, per_gpu_hour: {digits}}}]").prices
    assert price.per_gpu_hour == Decimal(digits)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("dimensions: {cost: [namespace]}", "give yours another name"),
        ("idle: [{kind: idle, share: allocated, mig_profile: '7g.*'}]", "whole physical GPUs"),
    ],
)
def test_meaningless_policies_are_rejected(text: str, remedy: str) -> None:
    with pytest.raises(PolicyError, match=remedy):
        parse_policy(text)


def test_all_errors_between_the_parts_are_reported_at_once() -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy("currency: XXX\nteams:\n- {team: a, match: {nmespace: b}}")
    assert [mistake[:6] for mistake in raised.value.mistakes] == ["line 1", "line 3"]


def test_all_errors_of_all_rows_are_reported_at_once_in_the_order_of_their_lines() -> None:
    text = """currency: EUR
prices:
- {name: a, per_gpu_hour: 1,5, modell: x}
- {name: b, per_gpu_hour: 010}
- {name: c, per_gpu_hour: 1}
- {name: c, per_gpu_hour: 1, currency: USD}
basis:
- {basis: blended}
teams:
- {team: a, match: {nmespace: b}, from: 2026-02-30}
- {team: a, match: {nmespace: b}}
budgets:
- {amount: dear, from: 2026-01-01}
"""
    with pytest.raises(PolicyError) as raised:
        parse_policy(text)
    places = [": ".join(mistake.split(": ")[:2]) for mistake in raised.value.mistakes]
    assert places == [
        "line 3: prices[0].per_gpu_hour",
        "line 3: prices[0].modell",
        "line 4: prices[1].per_gpu_hour",
        "line 6: prices[3].currency",
        "line 6: prices[3].name",
        "line 8: basis[0]",
        "line 10: teams[0].from",
        "line 11: teams[1].match.nmespace",
        "line 13: budgets[0].amount",
        "line 13: budgets[0]",
        "line 13: budgets[0]",
    ]


@pytest.mark.parametrize(
    ("invalid", "other"),
    [
        ("currency: 5", "teams:\n- {team: a, match: {nmespace: b}}"),
        ("exchange_rates: [{currency: EUR}]", "teams:\n- {team: a, match: {nmespace: b}}"),
        ("dimensions: {unit: namespace}", "prices:\n- {name: a, per_gpu_hour: 1, currency: XXX}"),
        ("dimensions: 5", "budgets:\n- {name: a, amount: 1, from: 2026-02-01, to: 2026-01-01}"),
    ],
)
def test_an_invalid_section_hides_only_the_errors_of_parts_that_refer_to_it(
    invalid: str, other: str
) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy(f"{invalid}\n{other}")
    assert {mistake[:6] for mistake in raised.value.mistakes} == {"line 1", "line 3"}


@pytest.mark.parametrize(
    ("invalid", "reference"),
    [
        ("currency: 5", "prices:\n- {name: a, per_gpu_hour: 1, currency: EUR}"),
        ("dimensions: {unit: namespace}", "teams:\n- {team: a, match: {unit: b}}"),
    ],
)
def test_a_reference_to_an_invalid_section_is_not_an_error(invalid: str, reference: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_policy(f"{invalid}\n{reference}")
    assert {mistake[:6] for mistake in raised.value.mistakes} == {"line 1"}


def test_the_hash_of_a_file_depends_only_on_its_meaning(tmp_path: Path) -> None:
    texts = [
        "prices: [{name: a, per_gpu_hour: 1.50}]",
        "# dear\nprices:\n- per_gpu_hour: 1.50\n  name: a\n",
        "prices: [{name: a, per_gpu_hour: 1.51}]",
    ]
    hashes = []
    for text in texts:
        file = tmp_path / "prices.yaml"
        file.write_text(text)
        hashes.append(read_policy(file).sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_example_of_the_repository_is_valid_and_has_every_part() -> None:
    policy = read_policy(EXAMPLE).policy
    assert [name for name in policy.__struct_fields__ if not getattr(policy, name)] == []
    kinds = {
        kind
        for price in policy.prices
        for kind in ("per_gpu_hour", "instance", "purchase")
        if getattr(price, kind) is not None
    }
    assert kinds == {"per_gpu_hour", "instance", "purchase"}
    # It also contains the optional fields, so that readers find their names.
    text = EXAMPLE.read_text()
    fields = {
        field
        for part in (
            BillPolicy,
            type(policy.prices[0]),
            type(policy.idle[0]),
            type(policy.teams[0]),
        )
        for field in part.__struct_encode_fields__
    }
    assert [field for field in sorted(fields) if f"{field}:" not in text] == []


def test_each_built_in_price_states_its_source_its_date_and_that_it_was_not_checked() -> None:
    policy = read_policy(None).policy
    assert all(price.as_of and price.as_of.year >= 2025 for price in policy.prices)
    words = ("not checked", "guess")
    assert all(any(word in (price.source or "") for word in words) for price in policy.prices)
    assert "example" in read_policy(None).name
    assert DEFAULT_FILE.is_file()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A400", None),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA T400", None),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_built_in_prices_recognize_products_by_their_names(
    model: str, name: str | None
) -> None:
    book = PriceBook(read_policy(None).policy)
    price = book.rate_of(DeviceTraits("prod", "n", model), date(2026, 10, 1)).price
    assert (price.name if price else None) == name


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ({}, {"product": "H100"}),
        ({"model": "*H100*"}, {"model": "NVIDIA H100*SXM?"}),
        ({"model": "A?00"}, {"model": "A100"}),
        ({"product": "H100"}, {"product": "h100 80GB", "region": "us"}),
        ({"product": "H100"}, {"model": "NVIDIA H100 PCIe"}),
        ({"region": "*"}, {"model": "A100"}),
        ({"to": "2027-01-01"}, {"from": "2026-10-01", "to": "2026-11-01"}),
    ],
)
def test_a_row_covers_rows_with_the_same_or_more_conditions(
    earlier: dict[str, str], later: dict[str, str]
) -> None:
    rows = [msgspec.convert(row, Scoped) for row in (earlier, later)]
    assert rows[0].covers(rows[1])
    assert not rows[1].covers(rows[0])


PATTERNS = st.text("ab*?", max_size=4)
DAYS = st.dates(date(2026, 1, 1), date(2026, 1, 6))


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "product": st.sampled_from(["a", "b", "a b", "B-A"]),
                "model": PATTERNS | st.sampled_from(["a b", "a b*"]),
                "region": PATTERNS,
                "from": DAYS,
                "to": DAYS.map(lambda day: day.replace(month=2)),
            },
        ).map(lambda row: msgspec.convert(row, Scoped)),
        min_size=2,
        max_size=2,
    ),
    model=st.none() | st.text("ab -", max_size=4),
    region=st.none() | st.text("ab", max_size=3),
    day=DAYS,
)
def test_no_device_or_day_of_a_covered_row_is_outside_the_row_that_covers_it(
    rows: list[Scoped], model: str | None, region: str | None, day: date
) -> None:
    earlier, later = rows
    facts = {"model": model, "region": region}
    if earlier.covers(later) and later.holds_on(day) and later.fits(facts):
        assert earlier.holds_on(day)
        assert earlier.fits(facts)


RATES = """
currency: EUR
exchange_rates:
- {currency: USD, rate: 0.90, from: 2026-01-01}
- {currency: USD, rate: 0.80, from: 2026-10-01}
prices:
- {name: old, model: H100, per_gpu_hour: 9, to: 2026-10-01}
- {name: spot, model: H100, capacity_type: spot, per_gpu_hour: 2, currency: USD}
- {name: pool, node_pool: "own-*", purchase: {capital: 240000, residual: 24000,
   lifetime_hours: 43200, hosting_per_hour: 2, support_per_hour: 1, gpus: 8}}
- {name: machine, instance_type: p5.48xlarge, region: "us-*",
   instance: {per_hour: 98.32, gpus: 8, vcpus: 192, memory_gb: 2048}}
- {name: rest, cluster: prod, per_gpu_hour: 1.25}
"""


@pytest.mark.parametrize(
    ("facts", "day", "name", "rate"),
    [
        ({"model": "H100"}, date(2026, 9, 30), "old", Fraction(9)),
        ({"model": "H100"}, date(2026, 10, 1), "rest", Fraction(5, 4)),
        ({"model": "H100", "capacity_type": "spot"}, date(2026, 10, 1), "spot", Fraction(8, 5)),
        ({"node_pool": "own-1"}, date(2026, 9, 1), "pool", Fraction(1)),
        (
            {"instance_type": "p5.48xlarge", "region": "us-east-1"},
            date(2026, 9, 1),
            "machine",
            # 98.32 x 9 / (9 x 8 + 0.9 x 192 + 0.1 x 2048), exactly.
            Fraction(88488, 100) / Fraction(4496, 10),
        ),
        (
            {"instance_type": "p5.48xlarge", "region": "eu"},
            date(2026, 9, 1),
            "rest",
            Fraction(5, 4),
        ),
    ],
)
def test_the_first_row_that_matches_the_device_and_the_day_is_its_price(
    facts: dict[str, str], day: date, name: str, rate: Fraction
) -> None:
    known = {"cluster": "prod", "node": "n", **facts}
    device = DeviceTraits._make(known.get(field) for field in DeviceTraits._fields)
    found = PriceBook(parse_policy(RATES)).rate_of(device, day)
    assert found.price is not None
    assert (found.price.name, found.per_gpu_hour) == (name, rate)


def test_amounts_in_other_currencies_require_a_rate_of_the_day() -> None:
    device = DeviceTraits("prod", "n", "H100", capacity_type="spot")
    with pytest.raises(Exception, match="no exchange rate for USD on 2025-12-31"):
        PriceBook(parse_policy(RATES.replace(", to: 2026-10-01", ", to: 2025-01-01"))).rate_of(
            device, date(2025, 12, 31)
        )


@given(
    amounts=st.lists(st.fractions(min_value=-1000, max_value=1000), max_size=12),
    digits=st.integers(0, 4),
)
def test_rounded_lines_sum_to_the_rounded_sum_and_none_differs_by_a_whole_unit(
    amounts: list[Fraction], digits: int
) -> None:
    rounded = quantize_together(amounts, digits=digits)
    assert sum(rounded) == round(sum(amounts, Fraction(0)), digits)
    unit = Fraction(1, 10**digits)
    for amount, line in zip(amounts, rounded, strict=True):
        assert abs(Fraction(line) - amount) < unit


@pytest.mark.parametrize(
    ("currency", "digits"), [("USD", 2), ("EUR", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4)]
)
def test_amounts_have_the_digits_of_their_currency(currency: str, digits: int) -> None:
    assert minor_digits(currency) == digits
    assert len(CURRENCIES) > 150


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (Fraction(1, 3), "0.333333333333"),
        (Fraction(7), "7"),
        (Fraction(-5, 2), "-2.5"),
        (Fraction(1000), "1000"),
        (Decimal("1E+3"), "1000"),
    ],
)
def test_amounts_are_written_without_exponents(amount: Fraction | Decimal, text: str) -> None:
    assert text_of(amount) == text


def test_nested_aliases_are_rejected_before_they_are_expanded() -> None:
    layers = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    text = "\n".join(["l0: &l0 [1, 2, 3]", *layers])
    with pytest.raises(PolicyError, match="values, including aliases"):
        parse_policy(text)
