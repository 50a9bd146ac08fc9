"""The parameters of requests; each invalid one is named."""

from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import ArgumentError
from gpuledger_reports.api.endpoints import PAGES
from gpuledger_reports.api.fields import WITHOUT_VALUE, dimensions_of, field_names
from gpuledger_reports.api.filters import parse_field, parse_filter
from gpuledger_reports.api.questions import (
    AllocationQuestion,
    allocation_question,
    bill_question,
)
from tests.unit.reports.api.report_requests import DAY, NOW_SECONDS

NOW_US = int(NOW_SECONDS * 10**6)


def requested(**parameters: str) -> AllocationQuestion:
    return allocation_question(urlencode({"window": DAY, **parameters}), NOW_US)


@pytest.mark.parametrize(
    ("path", "query", "parameter"),
    [
        ("/allocation", "", "window"),
        ("/allocation", "window=soon", "window"),
        ("/allocation", "window=7d&window=7d", "window"),
        ("/allocation", "window=7d&step=90m", "step"),
        ("/allocation", "window=7d&step=0h", "step"),
        ("/allocation", "window=400d&step=1h", "step"),
        ("/allocation", "window=7d&accumulate=year", "accumulate"),
        ("/allocation", "window=7d&includeIdle=perhaps", "includeIdle"),
        ("/allocation", "window=7d&shareIdle=all", "shareIdle"),
        ("/allocation", "window=7d&shareSplit=odd", "shareSplit"),
        ("/allocation", "window=7d&shareLabels=app", "shareLabels"),
        ("/allocation", "window=7d&shareCost=100", "shareCost"),
        ("/allocation", "window=7d&filter=namespace", "filter"),
        ("/allocation", "window=7d&filter=namespace:a", "filter"),
        ("/allocation", "window=7d&filter=namespace~:%22a%22", "filter"),
        ("/allocation", "window=7d&filter=namespace:%22a%22%7Cpod:%22b%22", "filter"),
        ("/allocation", "window=7d&filter=provider:%22a%22", "filter"),
        ("/allocation", "window=7d&filter=label:%22a%22", "filter"),
        ("/allocation", "window=7d&filter=pod[x]:%22a%22", "filter"),
        ("/allocation", "window=7d&aggregate=a,b,c,d,e,f,g,h,i,j,k,l,m", "aggregate"),
        ("/allocation", "window=7d&limit=3", "limit"),
        ("/allocation", "window=%ff", "query"),
        ("/allocation/autocomplete", "field=namespace", "window"),
        ("/allocation/autocomplete", "window=7d", "field"),
        ("/allocation/autocomplete", "window=7d&field=provider", "field"),
        ("/allocation/autocomplete", "window=7d&field=label", "field"),
        ("/allocation/autocomplete", "window=7d&field=pod&limit=1001", "limit"),
        ("/bill", "period=2026-13", "period"),
        ("/bill", "period=2026-10&from=1800000000", "period"),
        ("/bill", "from=2026-10-01T00:00:00Z", "to"),
        ("/bill", "from=2026-10-01T00:30:00Z&to=2026-10-02T00:00:00Z", "from"),
        ("/bill", "from=1800000000&to=1799996400", "to"),
        ("/bill", "window=7d", "window"),
        ("/bill/explain", "period=2026-10", "line"),
        ("/bill/explain", "line=a&rows=-1", "rows"),
        ("/bill/explain", "line=a&rows=1000000", "rows"),
    ],
)
def test_an_invalid_parameter_is_named(path: str, query: str, parameter: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        PAGES[path](query, NOW_US)
    assert caught.value.name == parameter
    assert str(caught.value).startswith(f"{parameter}: ")


@given(
    st.sampled_from(sorted(PAGES)),
    st.text(max_size=200)
    | st.dictionaries(
        st.sampled_from(
            [
                *("window", "step", "period", "from", "to", "by", "rows", "shareLabels"),
                *("filter", "field", "limit"),
            ]
        ),
        st.text(max_size=40)
        | st.from_regex(r"\d{0,12}[a-zA-Z]?(,\d{0,12})?")
        | st.from_regex(r'\A(\w{1,9}(\[\w*\])?!?:("\w*",?)*[ +]?){0,3}\Z'),
    ).map(urlencode),
)
def test_any_query_is_a_question_or_names_its_invalid_parameter(path: str, query: str) -> None:
    mistake = None
    try:
        PAGES[path](query, NOW_US)
    except ArgumentError as error:
        mistake = error
    if mistake is not None:
        assert str(mistake).startswith(f"{mistake.name}: ")
        assert len(str(mistake)) < 1000


@pytest.mark.parametrize("name", field_names().split(", "))
def test_each_field_in_messages_groups_and_filters_allocations(name: str) -> None:
    field = name.replace("KEY", "app")
    assert field in WITHOUT_VALUE or dimensions_of(field)
    assert dimensions_of(parse_field(field, option="filter"))[-1:] == dimensions_of(field)[-1:]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {"aggregate": ("cluster", "node", "namespace", "pod"), "has_idle": False}),
        ({"aggregate": "namespace, label:app,"}, {"aggregate": ("namespace", "label:app")}),
        ({"idle": "true"}, {"has_idle": True}),
        ({"includeIdle": "1", "idleByNode": "T"}, {"has_idle": True, "idle_by_node": True}),
        ({"shareIdle": "true"}, {"share_idle": "weighted"}),
        ({"shareIdle": "false"}, {"share_idle": None}),
        ({"shareIdle": "even"}, {"share_idle": "even"}),
        ({"shareLabels": "app:x,tier:y"}, {"share_labels": (("app", "x"), ("tier", "y"))}),
        (
            {"filter": 'namespace:"a", "b"+label[app]!:"x" controllerKind:"Job"'},
            {
                "filters": (
                    ("namespace", ("a", "b"), False),
                    ("label:app", ("x",), True),
                    ("controllerKind", ("job",), False),
                )
            },
        ),
        (
            {"filter": 'label:app.kubernetes.io/name:"x"+namespacelabel:team!:"y"'},
            {
                "filters": (
                    ("label:app.kubernetes.io/name", ("x",), False),
                    ("namespace-label:team", ("y",), True),
                )
            },
        ),
        ({"filter": "", "shareCost": "0", "sharelb": "false", "resolution": "1m"}, {}),
    ],
)
def test_queries_of_opencost_clients_are_accepted(
    parameters: dict[str, str], expected: dict[str, object]
) -> None:
    question = requested(**parameters)
    assert {name: getattr(question, name) for name in expected} == expected


def test_a_bill_without_a_time_is_of_the_newest_month() -> None:
    question = bill_question("", NOW_US)
    assert (question.window, question.by) == (None, ("namespace",))


@pytest.mark.parametrize("joint", ["|", " | "])
def test_the_error_of_terms_joined_by_or_has_the_remedy(joint: str) -> None:
    with pytest.raises(ArgumentError, match=r"`\|` is not supported") as raised:
        parse_filter(f'namespace:"a"{joint}namespace:"b"')
    assert 'namespace:"a","b"' in str(raised.value)
