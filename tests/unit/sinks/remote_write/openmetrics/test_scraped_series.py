"""What is sent of the scrapes of a target: labels, times, ends, and what is told of it."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from gpuledger_sinks.remote_write.openmetrics.exposition import TEXT, parse_exposition
from gpuledger_sinks.remote_write.openmetrics.scraped_series import (
    EncodedScrape,
    Scrape,
    ScrapedSeries,
    TimeLimits,
)
from gpuledger_sinks.remote_write.wire import STALE_VALUE, Version, encode_value
from tests.unit.sinks.remote_write.oracle import (
    RequestV2,
    parse_exemplars,
    parse_v2,
)

START_MS = 1_790_000_000_000
REPORTED = {
    "up",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
    "scrape_samples_post_metric_relabeling",
    "scrape_series_added",
}


class Sent(NamedTuple):
    labels: Mapping[str, str]
    value: float
    time_ms: int
    is_end: bool


def series(
    *,
    external: Mapping[str, str] | None = None,
    max_age_ms: int | None = None,
    instance: str = "host:9100",
) -> ScrapedSeries:
    return ScrapedSeries(
        job="test",
        instance=instance,
        external_labels=external or {},
        limits=TimeLimits(max_ahead_ms=300_000, max_age_ms=max_age_ms),
    )


def add(
    to: ScrapedSeries, page: str | None, *, second: int = 0, content_type: str = TEXT
) -> EncodedScrape:
    """Add what a page says in a second; `None` is a scrape that failed."""
    exposition = None
    if page is not None:
        exposition = parse_exposition(page.encode(), content_type=content_type, max_samples=99)
    time_ms = START_MS + second * 1000
    return to.add(Scrape(time_ms=time_ms, duration_seconds=0.25, exposition=exposition))


def sent(scrape: EncodedScrape) -> dict[str, Sent]:
    """Return what is sent of a scrape, by the names of metrics, of which each is there once."""
    (request,) = scrape.requests(99)
    body = request.encode(Version.V2)
    values = [one.samples[0].value for one in RequestV2.FromString(body).timeseries]
    found = {}
    for value, told in zip(values, parse_v2(body), strict=True):
        labels = {name: text for name, text in told.series.labels if name != "__name__"}
        is_end = encode_value(value) == STALE_VALUE
        assert told.series.name not in found
        found[told.series.name] = Sent(labels, value, told.series.time_ms, is_end)
    return found


def scraped(scrape: EncodedScrape) -> dict[str, Sent]:
    """Return what is sent of the page itself."""
    return {name: one for name, one in sent(scrape).items() if name not in REPORTED}


def test_what_is_scraped_has_the_targets_labels_and_the_time_of_the_scrape() -> None:
    found = scraped(add(series(), 'm{a="1"} 2\n', second=3))

    labels = {"a": "1", "job": "test", "instance": "host:9100"}
    assert found == {"m": Sent(labels, 2.0, START_MS + 3000, is_end=False)}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"job": "a"}, {"exported_job": "a"}),
        ({"instance": "a"}, {"exported_instance": "a"}),
        ({"job": "a", "exported_job": "b"}, {"exported_exported_job": "a", "exported_job": "b"}),
        ({"exported_job": "b"}, {"exported_job": "b"}),
        ({"site": "a"}, {"site": "a"}),
        ({}, {"site": "external"}),
    ],
)
def test_labels_of_the_page_that_the_target_has_are_exported(
    given: dict[str, str], kept: dict[str, str]
) -> None:
    page = "m{" + ",".join(f'{name}="{value}"' for name, value in given.items()) + "} 1\n"

    found = scraped(add(series(external={"site": "external"}), page))["m"].labels

    expected = {"job": "test", "instance": "host:9100", "site": "external", **kept}
    assert found == expected


def test_each_scrape_tells_of_the_target() -> None:
    found = sent(add(series(), "a 1\nb 1\n"))

    assert {name: one.value for name, one in found.items() if name in REPORTED} == {
        "up": 1,
        "scrape_duration_seconds": 0.25,
        "scrape_samples_scraped": 2,
        "scrape_samples_post_metric_relabeling": 2,
        "scrape_series_added": 2,
    }
    assert found["up"].labels == {"job": "test", "instance": "host:9100"}


def test_series_that_go_on_are_not_added() -> None:
    target = series()
    add(target, "a 1\n")

    assert sent(add(target, "a 1\nb 1\n", second=1))["scrape_series_added"].value == 1


def test_nothing_that_is_scraped_is_the_targets_up() -> None:
    scrape = add(series(), "up 7\n")

    assert sent(scrape)["up"].value == 1
    assert scrape.dropped == {"duplicate": 1}


def test_another_series_of_the_name_is_the_pages_own() -> None:
    target = series()
    scrape = add(target, 'up{a="1"} 7\n')

    assert not scrape.dropped
    (request,) = scrape.requests(99)
    names = [one.series.name for one in parse_v2(request.encode(Version.V2))]
    assert names.count("up") == 2


def test_a_series_that_is_gone_ends_once() -> None:
    target = series()
    add(target, "a 1\nb 1\n")

    found = scraped(add(target, "a 1\n", second=1))
    assert {name: one.is_end for name, one in found.items()} == {"a": False, "b": True}
    assert found["b"].time_ms == START_MS + 1000
    assert scraped(add(target, "a 1\n", second=2)).keys() == {"a"}


def test_a_scrape_that_fails_ends_all_series_and_says_that_the_target_is_down() -> None:
    target = series()
    add(target, "a 1\nb 1\n")

    found = sent(add(target, None, second=1))
    assert {name for name, one in found.items() if one.is_end} == {"a", "b"}
    assert (found["up"].value, found["up"].is_end) == (0, False)
    assert sent(add(target, None, second=2)).keys() == REPORTED


def test_a_series_that_comes_back_goes_on() -> None:
    target = series()
    for second, page in enumerate(["a 1\n", None]):
        add(target, page, second=second)

    assert scraped(add(target, "a 5\n", second=2))["a"].value == 5


def test_a_value_that_is_no_number_is_no_end() -> None:
    found = scraped(add(series(), "a NaN\n"))["a"]

    assert math.isnan(found.value)
    assert not found.is_end


def at(second: float) -> str:
    return f"{START_MS + round(second * 1000)}"


@pytest.mark.parametrize(
    ("second", "reason"), [(301, "future"), (-61, "too_old"), (-1_789_999_000, "invalid")]
)
def test_a_time_of_the_page_that_is_far_off_is_not_sent(second: float, reason: str) -> None:
    scrape = add(series(max_age_ms=60_000), f"a 1 {at(second)}\nb 1\n")

    assert scraped(scrape).keys() == {"b"}
    assert scrape.dropped == {reason: 1}


def test_a_time_of_the_page_counts_and_its_series_does_not_end_with_it() -> None:
    target = series()

    assert scraped(add(target, f"a 1 {at(-5)}\n"))["a"].time_ms == START_MS - 5000
    assert not scraped(add(target, "", second=1))


@pytest.mark.parametrize(
    ("second", "value", "dropped"),
    [(0, 1, {}), (0, 2, {"duplicate": 1}), (-1, 1, {"out_of_order": 1})],
)
def test_a_series_goes_up_in_time_alone(second: float, value: int, dropped: dict[str, int]) -> None:
    target = series()
    add(target, f"a 1 {at(0)}\n")

    scrape = add(target, f"a {value} {at(second)}\n", second=1)
    assert not scraped(scrape)
    assert scrape.dropped == dropped


def test_a_clock_that_is_set_back_sends_nothing_until_it_has_passed_where_it_was() -> None:
    target = series()
    add(target, "a 1\n", second=5)

    back = add(target, "a 1\n", second=4)
    assert not list(back.requests(99))
    assert back.dropped == {"out_of_order": 1 + len(REPORTED)}
    assert scraped(add(target, "a 1\n", second=6)).keys() == {"a"}


@pytest.mark.parametrize(
    "page", ["a 1\na 2\n", 'a{job="x"} 1\na{exported_job="x"} 2\n', 'a{b=""} 1\na 2\n']
)
def test_of_one_series_the_first_sample_of_a_page_is_sent(page: str) -> None:
    scrape = add(series(), page)

    assert scraped(scrape)["a"].value == 1
    assert scrape.dropped == {"duplicate": 1}


def test_an_exemplar_is_sent_once_and_has_a_time() -> None:
    def page(value: int, trace: str) -> str:
        return f'# TYPE a counter\na_total {value} # {{trace_id="{trace}"}} 1.0\n# EOF\n'

    target, found = series(), []
    for second, trace in enumerate(["x", "x", "y"]):
        openmetrics = "application/openmetrics-text"
        scrape = add(target, page(second, trace), second=second, content_type=openmetrics)
        (request,) = scrape.requests(99)
        found.append([one for one in parse_exemplars(request.encode(Version.V1)) if one])

    assert found == [
        [[((("trace_id", "x"),), 1.0, START_MS)]],
        [],
        [[((("trace_id", "y"),), 1.0, START_MS + 2000)]],
    ]


def test_a_request_has_no_more_samples_than_it_may_and_times_go_up() -> None:
    scrape = add(series(), f"a 1 {at(-5)}\nb 1\nc 1 {at(-9)}\nd 1 {at(2)}\n")

    requests = list(scrape.requests(2))
    assert [request.samples for request in requests] == [2, 2, 2, 2, 1]
    times = [one.series.time_ms for r in requests for one in parse_v2(r.encode(Version.V2))]
    assert times == sorted(times)
