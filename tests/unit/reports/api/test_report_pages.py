"""The HTTP endpoints: the response to each request, in the form of the OpenAPI description."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import jsonschema
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer
from gpuledger_reports.api.description import description
from gpuledger_reports.api.endpoints import PAGES
from gpuledger_reports.api.pages import FIXED, AnswerCache
from gpuledger_reports.api.processes import BusyError, LateError, ProcessEndedError
from gpuledger_reports.api.questions import Question
from tests.examples import examples
from tests.unit.reports.api.report_requests import (
    DAY,
    INTERVAL_SECONDS,
    PRICES,
    InlinePages,
    Response,
    settings_for,
    small_store,
)
from tests.unit.reports.stores import allocated, write_store

DESCRIPTION: dict[str, Any] = json.loads(description())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> AnswerSettings:
    return small_store(tmp_path_factory.mktemp("small"))


@pytest.fixture
def served(reported: AnswerSettings) -> InlinePages:
    return InlinePages(reported)


def parameters_of(path: str) -> dict[str, dict[str, Any]]:
    """Return an endpoint's parameters by their names."""
    named = DESCRIPTION["paths"][path]["get"].get("parameters", [])
    known = DESCRIPTION["components"]["parameters"]
    found = [known[one["$ref"].rpartition("/")[2]] if "$ref" in one else one for one in named]
    return {one["name"]: one for one in found}


def check_form(path: str, response: Response) -> Any:  # noqa: ANN401  # any JSON
    """Return a response's content after checking it against the description."""
    described = DESCRIPTION["paths"][path]["get"]["responses"][str(response.status)]
    if "$ref" in described:
        described = DESCRIPTION["components"]["responses"][described["$ref"].rpartition("/")[2]]
    media_type = response.headers["content-type"].partition(";")[0]
    schema = described["content"][media_type]["schema"]
    if media_type != "application/json":
        return response.body
    content = json.loads(response.body)
    # With the references resolved within the description itself.
    validator = jsonschema.Draft202012Validator(
        {**schema, "components": DESCRIPTION["components"]},
        format_checker=jsonschema.FormatChecker(),
    )
    validator.validate(content)
    assert set(response.headers) >= {name.lower() for name in described.get("headers", {})}
    return content


def test_the_description_is_openapi_and_names_every_endpoint_and_parameter() -> None:
    assert DESCRIPTION["openapi"].startswith("3.1.")
    assert {*DESCRIPTION["paths"]} == {*PAGES, *FIXED}


@pytest.mark.parametrize("path", PAGES)
async def test_the_described_parameters_are_the_accepted_ones(
    served: InlinePages, path: str
) -> None:
    response = await served.get(path, "no-such-parameter=1")
    message = check_form(path, response)["message"]
    listed = message.rpartition("parameters are ")[2].split(", ")
    assert sorted(listed) == sorted(parameters_of(path))


HOSTILE = (
    st.text(max_size=60)
    | st.sampled_from(
        ["'", '"; DROP TABLE usage; --', "../../etc/passwd", "%", "\0", "1e999", "-1"]
    )
    | st.from_regex(r"\A[\w:,./-]{0,40}\Z")
)
EXAMPLES: dict[str, list[str]] = {
    "window": [DAY, "today", "2d", "lastmonth"],
    "aggregate": ["namespace", "controller,label:app", "cluster,node", "team", "gpu"],
    "step": ["1d", "12h"],
    "accumulateBy": ["day", "none"],
    "period": ["2026-10", "2026-10-01", "2026"],
    "by": ["namespace", "pod,model", "label:app"],
    "line": ["a", "0"],
    "filter": ['namespace:"ns"', 'pod!:"a"+label[app]:"x"', 'controller:"a" label:app!:"x"'],
    "field": ["node", "label:app", "container"],
}


def allowed_values(parameter: dict[str, Any]) -> st.SearchStrategy[str]:
    """Return values that the description allows."""
    schema = parameter["schema"]
    allowed = [*schema.get("enum", ()), *EXAMPLES.get(parameter["name"], ())]
    if schema["type"] == "boolean":
        allowed += ["true", "false"]
    return st.sampled_from(allowed or [str(parameter.get("example", ""))])


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """Return an endpoint and parameters; at most one is missing or invalid."""
    path = draw(st.sampled_from(sorted(PAGES)))
    known = parameters_of(path)
    required = [name for name, one in known.items() if one["required"]]
    others = draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    given = {name: draw(allowed_values(known[name])) for name in (*required, *others)}
    attacked = draw(st.none() | st.sampled_from(sorted(known)))
    if attacked is not None:
        given[attacked] = draw(HOSTILE)
    missing = draw(st.sampled_from([None, None, None, *required]))
    return path, {name: value for name, value in given.items() if name != missing}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@examples(80)
@given(request=requests())
def test_every_response_has_the_described_form(
    reported: AnswerSettings, runner: asyncio.Runner, request: tuple[str, dict[str, str]]
) -> None:
    path, parameters = request
    served = InlinePages(reported)

    async def ask() -> Response:
        async with served.running():
            return await served.get(path, urlencode(parameters))

    response = runner.run(ask())
    event(f"{path} {response.status}")
    content = check_form(path, response)
    assert response.status in (200, 400)
    if response.status == 400:
        assert content["message"].startswith(f"{content['parameter']}: ")
        assert content["parameter"] in parameters_of(path)


async def test_an_answer_is_made_once_until_the_store_or_the_prices_change(
    tmp_path: Path,
) -> None:
    reported = small_store(tmp_path)
    served = InlinePages(reported)
    async with served.running():
        query = "period=2026-10-01&by=pod"
        first = await served.get("/bill", query)
        assert await served.get("/bill", f"by=pod&{query.partition('&')[0]}") == first
        assert len(served.answerer.requests) == 1
        write_store(tmp_path / "store", usage_hourly=[allocated(3, "b")])
        await served.check_store()
        changed = await served.get("/bill", query)
        assert changed.body != first.body
        (tmp_path / "prices.yaml").write_text("prices: [{name: h, model: H100, per_gpu_hour: 8}]")
        await served.check_store()
        dearer = await served.get("/bill", query)
        assert json.loads(dearer.body)["prices"] != json.loads(changed.body)["prices"]
        assert len(served.answerer.requests) == 3


async def test_long_requests_do_not_delay_the_check_of_the_store(
    tmp_path: Path,
) -> None:
    served = InlinePages(small_store(tmp_path))
    query = "period=2026-10-01&by=pod"
    async with served.running():
        kept = await served.get("/bill", query)
        served.answerer.waits_for = asyncio.Event()
        requested = [
            asyncio.create_task(served.get("/bill", f"period={year}")) for year in (2025, 2026)
        ]
        await asyncio.sleep(0)
        write_store(tmp_path / "store", usage_hourly=[allocated(3, "b")])
        await served.check_store()
        assert served.check.is_ok
        served.answerer.waits_for.set()
        await asyncio.gather(*requested)
        assert (await served.get("/bill", query)).body != kept.body


async def test_a_request_whose_client_disconnects_is_cancelled(served: InlinePages) -> None:
    gone, cancelled = asyncio.Event(), asyncio.Event()

    async def compute(_: Question) -> ReportAnswer:
        gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with served.running(compute):
        await served.get("/bill", gone=gone)
    assert cancelled.is_set()


@pytest.mark.parametrize(("intervals", "count", "count_later"), [(2.9, 1, 1), (3.1, 3, 4)])
async def test_answers_are_kept_for_three_intervals_without_a_successful_check(
    reported: AnswerSettings, intervals: float, count: int, count_later: int
) -> None:
    served = InlinePages(reported)
    async with served.running():
        await served.get("/bill", "by=pod")
        served.clock_seconds += intervals * INTERVAL_SECONDS
        await served.get("/bill", "by=pod")
        await served.get("/bill", "by=pod")
        assert len(served.answerer.requests) == count
        await served.check_store()
        await served.get("/bill", "by=pod")
        await served.get("/bill", "by=pod")
    assert len(served.answerer.requests) == count_later


async def test_a_store_that_does_not_answer_a_check_in_time_makes_the_service_unready(
    served: InlinePages,
) -> None:
    async def refuse(_: Question) -> ReportAnswer:
        raise LateError("no answer within 30 s")

    async with served.running():
        served.looker.ask = refuse  # type: ignore[method-assign,assignment]  # fails as a real one does
        await served.check_store()
    assert not served.check.is_ok
    assert "no answer within" in served.check.detail
    assert "request less" not in served.check.detail


async def test_the_bill_equals_that_of_the_command_and_its_lines_can_be_explained(
    served: InlinePages,
) -> None:
    async with served.running():
        bill = json.loads((await served.get("/bill", "period=2026-10&by=pod")).body)
        line = next(line for line in bill["lines"] if line["pod"] == "a")
        requested = f"period=2026-10&by=pod&line={line['line'][:6]}"
        found = check_form("/bill/explain", await served.get("/bill/explain", requested))
    assert (bill["line_cost"], line["cost"]) == ("28.00", "7.00")
    assert found["line"] == line["line"]
    assert any("1 GPU h x 7 = 7" in text for text in found["explanation"])
    assert any("offsets 0 to 9" in text for text in found["explanation"])


async def test_a_store_without_usage_is_reported_as_such_and_the_service_is_ready(
    tmp_path: Path,
) -> None:
    served = InlinePages(settings_for(str(tmp_path)))
    async with served.running():
        response = await served.get("/allocation", "window=7d")
    assert "no usage in the store" in check_form("/allocation", response)["message"]
    assert (response.status, response.headers["retry-after"]) == (503, "5")
    assert (served.check.is_ok, served.check.detail) == (True, "no usage yet")


async def test_invalid_prices_make_the_service_unready_until_they_are_valid(
    tmp_path: Path,
) -> None:
    served = InlinePages(small_store(tmp_path))
    prices = tmp_path / "prices.yaml"
    found = []
    async with served.running():
        for text in (PRICES, "prices: 7", PRICES):
            prices.write_text(text)
            await served.check_store()
            found.append((served.check.is_ok, "prices" in served.check.detail))
    assert found == [(True, False), (False, True), (True, False)]


async def test_a_request_that_exceeds_the_memory_is_an_invalid_window(
    reported: AnswerSettings,
) -> None:
    tight = settings_for(reported.store_uri, memory_bytes=200_000)
    served = InlinePages(tight)
    async with served.running():
        response = await served.get("/allocation", f"window={DAY}")
    content = check_form("/allocation", response)
    assert (response.status, content["parameter"]) == (400, "window")
    assert "200000" in content["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(BusyError("8 wait"), 503), (LateError("late"), 504), (ProcessEndedError("gone"), 503)],
)
async def test_a_response_that_reports_an_overload_has_the_described_form(
    served: InlinePages, error: Exception, status: int
) -> None:
    async def refuse(_: Question) -> ReportAnswer:
        raise error

    async with served.running(refuse):
        response = await served.get("/bill")
    assert response.status == status
    check_form("/bill", response)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/allocation", f"window={DAY}&step=1h"),
        ("/allocation/autocomplete", f"window={DAY}&field=pod"),
        ("/bill", "period=2026-10-01"),
        ("/bill/explain", "period=2026-10-01&line=a"),
        ("/capacity/fleet", "from=2026-10-01T00:00:00Z&to=2026-10-02T00:00:00Z"),
    ],
)
async def test_a_request_that_takes_too_long_is_logged_with_its_page_and_range(
    served: InlinePages, path: str, query: str
) -> None:
    async def refuse(_: Question) -> ReportAnswer:
        raise LateError("no answer within 30 s")

    async with served.running(refuse):
        with capture_logs() as lines:
            await served.get(path, query)
    window = "2026-10-01T00:00:00Z to 2026-10-02T00:00:00Z"
    found = [(each["event"], each["page"], each["window"]) for each in lines]
    assert found == [("bill_deadline_missed", path, window)]


async def test_endpoints_are_unavailable_before_the_start_and_after_the_end(
    served: InlinePages,
) -> None:
    assert (await served.get("/bill")).status == 503
    async with served.running():
        assert (await served.get("/bill")).status == 200
    assert (await served.get("/allocation", "window=7d")).status == 503


async def test_an_unknown_path_names_the_existing_ones(served: InlinePages) -> None:
    response = await served.get("/bills")
    assert response.status == 404
    assert "/bill/explain" in json.loads(response.body)["message"]


@given(
    st.lists(st.tuples(st.binary(max_size=3), st.integers(0, 60)), max_size=30),
    st.integers(0, 100),
)
def test_a_cache_never_exceeds_its_maximum_size(
    puts: list[tuple[bytes, int]], max_bytes: int
) -> None:
    cache = AnswerCache(max_bytes)
    kept: dict[bytes, Any] = {}
    for key, length in puts:
        cache.put(key, ReportAnswer(body=b"x" * length))
        kept = {one: found for one, _ in puts if (found := cache.get(one))}
        assert sum(len(one) + len(found.body) for one, found in kept.items()) <= max_bytes
    cache.clear()
    assert not any(cache.get(key) for key in kept)
