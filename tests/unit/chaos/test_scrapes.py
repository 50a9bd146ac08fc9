"""Scrapes become series in promtool's notation, and the end of a run is extended."""

import pytest

from tests.chaos.scrapes import Kind, Scrapes, Target, write_values

AGENT = Target(instance="a", component="agent", node="n")
LABELS = 'job="gpuledger",cluster="default",component="agent",node="n",instance="a"'


@pytest.mark.parametrize(
    ("values", "kind", "written"),
    [
        pytest.param([1, 1, 1], Kind.GAUGE, "1 1 1 1x9", id="constant"),
        pytest.param([None, 2.5], Kind.GAUGE, "_ 2.5 2.5x9", id="begins later"),
        pytest.param([1, None, None, 0], Kind.GAUGE, "1 stale _ 0 0x9", id="missed a scrape"),
        pytest.param([1, None], Kind.GAUGE, "1 stale _x10", id="missing at the end"),
        pytest.param([1, 2, 3], Kind.GAUGE, "1 2 3 4+1x9", id="gauge that rises"),
        pytest.param([1, 2, 2], Kind.GAUGE, "1 2 2 2x9", id="gauge that rose once"),
        pytest.param([0, 0, 3], Kind.COUNTER, "0 0 3 4.5+1.5x9", id="counter that rose once"),
        pytest.param([5, 0, 1], Kind.COUNTER, "5 0 1 1x9", id="counter that started again"),
        pytest.param([1, 2], Kind.COUNTER, "1 2 2x9", id="too short to rise"),
        pytest.param([1795999051.25], Kind.TIME, "1795999051.25 1795999051.25x9", id="a time"),
        pytest.param([50, 55, 55], Kind.TIME, "50 55 55 57+2x9", id="a time that moves"),
        pytest.param([55, 55, 55], Kind.TIME, "55 55 55 55x9", id="a time that stands"),
    ],
)
def test_a_series_continues_as_it_ended(
    values: list[float | None], *, kind: Kind, written: str
) -> None:
    assert write_values(values, extended=10, kind=kind) == written


def test_only_the_last_scrapes_show_whether_a_series_rises() -> None:
    assert write_values([0, *[9] * 6], extended=2, kind=Kind.COUNTER) == "0 9 9 9 9 9 9 9x1"


def test_series_have_the_labels_of_the_scrape_configuration_and_metrics_of_rules() -> None:
    scrapes = Scrapes(rules="gpuledger_lag_seconds > 1", started_seconds=0)
    scrapes.add({AGENT: None})
    page = '# HELP gpuledger_lag_seconds x\ngpuledger_lag_seconds{of="b"} 1.0\ngpuledger_other 2.0'
    scrapes.add({AGENT: page})
    assert scrapes.series(first=2, extended=2) == {
        f"up{{{LABELS}}}": "0 1 1x1",
        f'gpuledger_lag_seconds{{of="b",{LABELS}}}': "_ 1 1x1",
    }


def test_the_labels_of_a_page_take_precedence() -> None:
    exported = 'of="a,job=1",cluster="b"'
    assert (
        AGENT.labels(exported)
        == f'{exported},job="gpuledger",component="agent",node="n",instance="a"'
    )


def test_components_that_a_run_does_not_have_are_scraped_as_well() -> None:
    scrapes = Scrapes(rules="", started_seconds=0, others=["sink-rows"])
    scrapes.add({})
    assert scrapes.series(first=1, extended=2) == {
        'up{job="gpuledger",cluster="default",component="sink-rows",instance="sink-rows"}': "1 1x1"
    }


def test_a_series_rises_as_its_name_implies() -> None:
    names = ("gpuledger_a_total", "gpuledger_a_timestamp_seconds", "gpuledger_a_seconds")
    scrapes = Scrapes(rules=" ".join(names), started_seconds=0)
    for value in (0, 1, 1):
        scrapes.add({AGENT: "\n".join(f"{name} {value}.0" for name in names)})
    rising = {
        series.partition("{")[0]: values.rpartition(" ")[2]
        for series, values in scrapes.series(first=3, extended=2).items()
    }
    assert {name: rising[name] for name in names} == dict(
        zip(names, ("1.5+0.5x1", "3+2x1", "1x1"), strict=True)
    )


def test_the_first_scrapes_are_extended_without_the_later_ones() -> None:
    scrapes = Scrapes(rules="", started_seconds=0)
    scrapes.add({AGENT: ""})
    scrapes.add({AGENT: None})
    assert scrapes.series(first=1, extended=2) == {f"up{{{LABELS}}}": "1 1x1"}
