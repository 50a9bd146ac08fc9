"""Explains as text how a bill's line was calculated: prices, times, usage, Kafka offsets."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import ArgumentError
from gpuledger.keys import show_node
from gpuledger_reports.presenting.output import efficiency_text
from gpuledger_reports.pricing.billing import Bill, BillLine, BillMaker
from gpuledger_reports.pricing.closing import ClosedLine, taken_back
from gpuledger_reports.pricing.lookup import Cell, CellKey, Pricing
from gpuledger_reports.pricing.money import money_text, text_of
from gpuledger_reports.pricing.policy import SCOPE, BudgetRow, Dated, Price, TeamRow
from gpuledger_reports.pricing.rates import gpu_hour_of
from gpuledger_reports.pricing.tenants import UNKNOWN
from gpuledger_reports.reading.charging_sql import HOUR_UNITS, UNITS
from gpuledger_reports.reading.times import HOUR_US, time_text
from gpuledger_reports.reading.usage_sums import UsageRow


class _Span(NamedTuple):
    """Consecutive hours in which a node's GPUs have time without data."""

    node: str
    begin_us: int
    end_us: int
    units: int


class Explanation(NamedTuple):
    """A line and its explanation."""

    line: BillLine
    """The line as calculated now, even if it was closed; all amounts are zero if it no longer
    exists."""
    texts: Iterator[str]


def explanation_of(
    bill: Bill, begin: str, *, maker: BillMaker, closed: Sequence[ClosedLine], max_rows: int
) -> Explanation:
    """Return the line whose id begins with `begin`, and texts on its revisions and calculation.

    The line may exist only in `closed`, which contains the lines of all revisions. Raises
    ArgumentError unless exactly one line matches.
    """
    # By key, because a line that an older version closed has another id.
    lines = {line.key: line for line in bill.lines}
    found = {each.key: each.line for each in closed if each.line.startswith(begin)}
    found |= {key: line.id for key, line in lines.items() if line.id.startswith(begin)}
    if len(found) != 1:
        problem = "matches several lines" if found else "is not a line of this bill"
        raise ArgumentError("line", f"{begin!r} {problem}")
    ((key, id_),) = found.items()
    revisions = [each for each in closed if each.key == key]
    # A later revision confirms lines that it does not change.
    latest = max(closed, key=lambda each: each.revision).policy_sha256 if revisions else None
    texts = revision_texts(revisions, is_current=latest == bill.policy.sha256)
    if key not in lines:
        nothing = [f"line {id_}: no longer in the bill"]
        return Explanation(taken_back(revisions[-1]), chain(texts, nothing))
    line = lines[key]
    made = explain_line(bill, line, maker=maker, max_rows=max_rows)
    return Explanation(line, chain(texts, made))


def explain_line(bill: Bill, line: BillLine, *, maker: BillMaker, max_rows: int) -> Iterator[str]:
    """Yield the explanation of a line, with at most `max_rows` rows of usage; 0 means all."""
    named = _named(bill, line.values)
    kind = f", {line.idle_kind}" if line.idle_kind else ""
    yield f"line {line.id}: {named}{kind}"
    begin, end = map(time_text, bill.window)
    yield f"  {begin} to {end}, in {bill.currency}"
    yield f"  prices: {bill.policy.name}, sha256 {bill.policy.sha256}"
    versions = (f"{name} {v}" for name, v in bill.versions.items() if v is not None)
    yield f"  table versions: {', '.join(versions)}"
    yield ""
    yield from _arithmetic(bill, line)
    yield ""
    if line.idle_kind == "no_data" and UNKNOWN not in line.values:
        yield from _no_data(bill, line, maker, max_rows)
    else:
        yield from _usage(bill, line, maker, max_rows)


def revision_texts(revisions: Sequence[ClosedLine], *, is_current: bool) -> Iterator[str]:
    """Yield a text for each closed revision of a line; none if it was never closed.

    `is_current` is whether the bill's last revision has the prices with which the line is
    calculated now.
    """
    for each in revisions:
        word = "correction" if each.charge_class else "closed"
        yield (
            f"revision {each.revision}: {word} {money_text(each.cost, each.currency)}"
            f" {each.currency}, usage until {time_text(each.valid_through_us)}, prices"
            f" {each.policy_name} {each.policy_sha256[:12]}, tables {each.table_versions}"
        )
        for what, text in (("approved by", each.approved_by), ("note", each.note)):
            if text:
                yield f"  {what}: {text}"
    if revisions and not is_current:
        yield "the bill was closed with other prices than the calculation below"


def _arithmetic(bill: Bill, line: BillLine) -> Iterator[str]:
    cells = [
        pair
        for key, by_pricing in bill.cells.items()
        if CellKey(key.values[: bill.shown], key.kind) == CellKey(line.values, line.idle_kind)
        for pair in by_pricing.items()
    ]
    # Sorted by price and scope, so that the order does not depend on the store.
    for pricing, cell in sorted(cells, key=lambda pair: (_name(pair[0]), str(pair[0].scope))):
        if cell.billed:
            yield from _time_cost(bill, pricing, cell)
        if pricing.rate.energy and cell.energy_millijoules:
            yield (
                f"  energy {pricing.rate.energy.name}: {cell.energy_millijoules} mJ x"
                f" {text_of(pricing.rate.per_millijoule * 3_600_000_000)} per kWh with PUE"
                f" {pricing.rate.energy.pue} = {text_of(cell.energy_cost(pricing))}"
            )
    yield from _by_others(bill, line)
    if line.shared_cost:
        word = "share of idle and of others' costs" if line.shared_cost > 0 else "paid by others"
        yield f"  {word}: {text_of(line.shared_cost)}"
    if line.unused_cost:
        yield f"  unused cost, included above: {text_of(line.unused_cost)}"
    yield f"  sum: {text_of(line.exact_cost)}, rounded with the other lines: {line.cost:f}"


def _by_others(bill: Bill, line: BillLine) -> Iterator[str]:
    """Yield the use without an allocation, with the other line item of each."""
    texts = []
    users_pay = bill.policy.policy.use_without_allocation == "user"
    for (user, allocatee), by_pricing in bill.by_others.items():
        hours, paid = (
            f"{_hours(sum(getattr(cell, name) for cell in by_pricing.values()))} h"
            for name in ("units", "paid")
        )
        pays = f"; the user pays for {paid}" if users_pay else ""
        if user == line.key:
            named = _named(bill, allocatee.values)
            texts.append(f"  used without an allocation: {hours}, allocated to {named}{pays}")
        elif allocatee == line.key:
            texts.append(f"  used by others: {hours}, by {_named(bill, user.values)}{pays}")
    yield from sorted(texts)


def _named(bill: Bill, values: Sequence[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(bill.by, values, strict=True))


def _time_cost(bill: Bill, pricing: Pricing, cell: Cell) -> Iterator[str]:
    hours = Fraction(cell.billed, HOUR_UNITS)
    cluster, pool, model = pricing.scope
    where = ", ".join(filter(None, (model, cluster, pool and f"pool {pool}")))
    rate = pricing.rate
    product = f"{text_of(hours)} GPU h x {text_of(rate.per_gpu_hour)}"
    yield f"  {where}: {product} = {text_of(cell.cost(pricing))}"
    allocated, used = Fraction(cell.allocated, HOUR_UNITS), Fraction(cell.used, HOUR_UNITS)
    efficiency = f", efficiency {efficiency_text(used, allocated)}" if allocated else ""
    amounts = f"allocated {text_of(allocated, digits=6)} h, used {text_of(used, digits=6)} h"
    yield f"    {amounts}{efficiency}"
    if rate.price is None:
        yield "    no price matches: it costs nothing"
        return
    yield f"    price {rate.price.name}: {price_text(rate.price, bill.currency)}"
    if rate.exchange:
        yield (
            f"    1 {rate.exchange.currency} = {rate.exchange.rate} {bill.currency},"
            f" from {rate.exchange.since} on"
        )
    if rate.price.source:
        as_of = f", dated {rate.price.as_of}" if rate.price.as_of else ""
        yield f"    source: {rate.price.source}{as_of}"


def conditions_text(price: Price) -> str:
    """Return the GPUs and days to which a price applies."""
    conditions = {name: getattr(price, name) for name in ("product", *SCOPE)}
    found = [f"{name} {text}" for name, text in conditions.items() if text is not None]
    if price.model and not set("*?").intersection(price.model):
        exact = f"model {price.model}"
        found[found.index(exact)] = f"{exact} (only this whole name; *{price.model}* matches parts)"
    return ", ".join([*found, *_days_texts(price)]) or "any GPU"


def match_text(row: TeamRow | BudgetRow) -> str:
    """Return the tenants and days to which a team or a budget applies."""
    found = [f"{name} {pattern}" for name, pattern in row.match.items()]
    return ", ".join([*found, *_days_texts(row)]) or "any tenant"


def _days_texts(row: Dated | BudgetRow) -> list[str]:
    since = [f"from {row.since}"] if row.since else []
    return [*since, f"to {row.until}"] if row.until else since


def price_text(price: Price, currency: str) -> str:
    """Return the amount of a price, and how it is calculated."""
    unit = price.currency or currency
    if price.instance:
        bought = price.instance
        return (
            f"{bought.per_hour} {unit} x 9 / (9 x {bought.gpus} GPUs + 0.9 x {bought.vcpus} vCPUs"
            f" + 0.1 x {bought.memory_gb} GB) = {text_of(gpu_hour_of(price))} {unit} per GPU h"
        )
    if price.purchase:
        owned = price.purchase
        return (
            f"(({owned.capital} - {owned.residual}) / {owned.lifetime_hours} h +"
            f" {owned.hosting_per_hour} + {owned.support_per_hour}) / {owned.gpus} GPUs ="
            f" {text_of(gpu_hour_of(price))} {unit} per GPU h"
        )
    of = f"instance {price.mig_profile}" if price.mig_profile else "GPU"
    return f"{price.per_gpu_hour or Decimal(0)} {unit} per {of} h"


def _name(pricing: Pricing) -> str:
    return pricing.rate.price.name if pricing.rate.price else ""


def _usage(bill: Bill, line: BillLine, maker: BillMaker, max_rows: int) -> Iterator[str]:
    yield "usage by hour, node and GPU: seconds of physical GPUs, and the events' Kafka offsets"
    count, totals = 0, dict[str, int]()
    for row in maker.rows_of(bill, line):
        count += 1
        word, ns = _amount(row)
        totals[word] = totals.get(word, 0) + ns * row.factor
        if not max_rows or count <= max_rows:
            yield f"  {_row_text(row)}"
    if max_rows and count > max_rows:
        yield f"  and {count - max_rows} more rows; --rows 0 shows all"
    sums = [f"{word} {_seconds(units)} s" for word, units in sorted(totals.items())]
    yield f"  all {count} rows: {', '.join(sums) or 'no usage'}"


def _no_data(bill: Bill, line: BillLine, maker: BillMaker, max_rows: int) -> Iterator[str]:
    yield "hours without data by node: GPU-hours without samples"
    units: dict[tuple[str, int], int] = defaultdict(int)
    for gpu in maker.no_data_of(bill, line):
        node = show_node(gpu.device.cluster, gpu.device.node)
        units[node, gpu.since_us] += gpu.present - gpu.covered
    spans: list[_Span] = []
    for (node, begin_us), part in sorted(units.items()):
        end_us = min(begin_us + HOUR_US, bill.end_us)
        last = spans[-1] if spans else None
        if last and (last.node, last.end_us) == (node, begin_us):
            spans[-1] = last._replace(end_us=end_us, units=last.units + part)
        else:
            spans.append(_Span(node, begin_us, end_us, part))
    for span in spans[: max_rows or None]:
        begin, end = time_text(span.begin_us), time_text(span.end_us)
        yield f"  {begin} to {end} {span.node}: {_hours(span.units)} GPU h"
    if max_rows and len(spans) > max_rows:
        yield f"  and {len(spans) - max_rows} more rows; --rows 0 shows all"
    yield f"  all {len(spans)} rows: {_hours(sum(span.units for span in spans))} GPU h"


def _hours(units: int) -> str:
    return text_of(Fraction(units, HOUR_UNITS), digits=6)


def _row_text(row: UsageRow) -> str:
    word, ns = _amount(row)
    what = f"{word} {_seconds(ns * row.factor)}"
    if row.is_allocated and row.unresponsive_ns:
        what += f" (unresponsive {_seconds(row.unresponsive_ns * row.factor)})"
    return (
        f"{time_text(row.hour_us)} {row.node} {row.gpu_uuid} {row.pod or '-'} {what}"
        f"  partition {row.kafka_partition}, offsets {row.first_offset} to {row.last_offset}"
    )


def _amount(row: UsageRow) -> tuple[str, int]:
    """Return a row's nanoseconds of device time, with the word for them."""
    if not row.is_allocated:
        return "used", row.busy_ns
    return "not allocated" if row.is_of_nobody else "allocated", row.allocated_ns


def _seconds(units: int) -> str:
    return text_of(Fraction(units, UNITS * NS_PER_SECOND), digits=9)
