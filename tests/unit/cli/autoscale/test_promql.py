"""What the checks of autoscalers read from a query, and that they survive any text."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_cli.autoscale.promql import Query
from tests.tables import for_each

SAME: Final = (
    "{}",
    "({})",
    "# average\n{}",
    "  {}\n",
    "1 * ({})",
    "({}) / 1",
    "({}) or vector(0)",
    "{} or 0 * count(d)",
    "{} or on () vector(0)",
    "({} or ignoring (x) vector(0)) * 100",
    "scalar({})",
    "round({}, 0.1)",
    "clamp_max({}, 1) or vector(0)",
    "avg_over_time({}[5m:])",
)


@for_each("form", SAME)
@for_each("query", ('avg(a{b=~"c.*"})', "sum by (b) (a)", "sum(a) without (b)"))
def test_brackets_comments_and_constants_do_not_hide_an_aggregation(form: str, query: str) -> None:
    outer = Query(form.format(query)).outer
    assert outer
    assert outer.name == query[:3]


@for_each("form", ("({})", "{} or vector(0)", "({} or 0 * count(d))", "(({})) or on () vector(0)"))
@for_each("query", ("a", "a * on (b) c", "(a) + (b)"))
def test_the_main_query_has_neither_brackets_nor_an_alternative(form: str, query: str) -> None:
    texts = [token.text for token in Query(form.format(query)).main.tokens]
    assert texts == [token.text for token in Query(query).tokens]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("sum(a) / count(a)", "avg"),
        ("(sum(a) / count(a)) or vector(0)", "avg"),
        ("sum by (b) (a) / count by (b) (c)", "avg"),
        ("sum(a) / sum(b)", None),
        ("sum(a) * count(a)", None),
        ("rate(a[5m])", None),
    ],
)
def test_a_sum_divided_by_a_count_is_an_average(query: str, name: str | None) -> None:
    outer = Query(query).outer
    assert (outer.name if outer else None) == name


@pytest.mark.parametrize(
    ("query", "series"),
    [
        ('sum by (pod) (a_b:c{x="y"}[5m] offset 1h)', ("a_b:c",)),
        ("avg_over_time(a[5m:1m]) > bool 1e3", ("a",)),
        ('sum(a) by (b) / on (c) group_left (d) e{f=~"g h"} unless i', ("a", "e", "i")),
        ('{__name__="a", b="c"}', ("a",)),
        ('{__name__=~"a|b"}', ("a", "b")),
        ('{"a.b", c="d"}', ("a.b",)),
        ("a{b=\"}\", c='sum(d)'} # e", ("a",)),
    ],
)
def test_the_series_of_a_query_are_names_and_neither_labels_nor_functions(
    query: str, series: tuple[str, ...]
) -> None:
    assert Query(query).series == series


PARTS: Final = (
    "sum",
    "avg",
    "by",
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    '"',
    "=~",
    "*",
    "/",
    "or",
    "a",
    "1",
    " ",
    ",",
)


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_any_text_is_a_query_about_which_little_is_known(text: str) -> None:
    query = Query(text)
    assert isinstance(
        (query.outer, query.factor, query.series, query.matchers, query.functions), tuple
    )
