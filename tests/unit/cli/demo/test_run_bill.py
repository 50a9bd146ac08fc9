"""The displayed costs of a run."""

from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from gpuledger_cli.demo.run_bill import shown_costs
from gpuledger_reports.pricing.money import rounded

COSTS = st.fractions(0, 1, max_denominator=10**7)


@given(st.lists(st.tuples(COSTS, st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(1)]))))
def test_unused_cost_is_a_part_of_the_cost_or_all_of_it_if_nothing_was_used(
    lines: list[tuple[Fraction, Fraction]],
) -> None:
    shown = shown_costs([(cost, cost * part) for cost, part in lines])
    for (cost, unused), (_, part) in zip(shown, lines, strict=True):
        assert 0 <= unused <= cost
        assert part != 1 or unused == cost
        assert part != 0 or unused == 0
    exact = sum((cost for cost, _ in lines), Fraction(0))
    assert sum((cost for cost, _ in shown), Decimal(0)) == rounded(exact, digits=4)
