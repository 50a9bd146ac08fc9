"""What is read of a page in OpenMetrics or Prometheus' text format."""

import math
from itertools import count
from typing import Any

import pytest

from gpuledger_sinks.remote_write.openmetrics.exposition import (
    MAX_LINE_CHARACTERS,
    OPENMETRICS,
    PARSE_SECONDS,
    TEXT,
    NoExpositionError,
    ScrapedExemplar,
    ScrapedSample,
    parse_exposition,
)

HISTOGRAM = """\
# HELP wait_seconds Time that jobs waited.
# TYPE wait_seconds histogram
# UNIT wait_seconds seconds
wait_seconds_bucket{le="1.0",queue="a"} 2 # {trace_id="abc"} 0.5
wait_seconds_bucket{le="+Inf",queue="a"} 3
wait_seconds_count{queue="a"} 3
wait_seconds_sum{queue="a"} 7.5
wait_seconds_created{queue="a"} 1700000000.5
# EOF
"""


def read(page: str, content_type: str = OPENMETRICS, *, max_samples: int = 99) -> Any:  # noqa: ANN401  # a test says what of it
    return parse_exposition(page.encode(), content_type=content_type, max_samples=max_samples)


def samples(page: str, content_type: str = OPENMETRICS) -> list[ScrapedSample]:
    return list(read(page, content_type).samples)


def test_a_counter_has_its_start_its_exemplar_and_what_is_told_of_it() -> None:
    (sample,) = samples(
        "# HELP jobs Jobs that were done.\n"
        "# TYPE jobs counter\n"
        'jobs_total{queue="a"} 3 # {trace_id="abc"} 1.5 1700000001.25\n'
        'jobs_created{queue="a"} 1700000000.5\n'
        "# EOF\n"
    )

    assert (sample.name, sample.labels, sample.value) == ("jobs_total", (("queue", "a"),), 3)
    assert sample.family == ("jobs_total", "counter", "Jobs that were done.", "")
    assert sample.start_ms == 1_700_000_000_500
    assert sample.exemplar == ScrapedExemplar((("trace_id", "abc"),), 1.5, 1_700_000_001_250)


def test_each_part_of_a_histogram_has_the_start_and_the_unit_of_the_whole() -> None:
    found = samples(HISTOGRAM)

    assert [(sample.name, dict(sample.labels).get("le")) for sample in found] == [
        ("wait_seconds_bucket", "1.0"),
        ("wait_seconds_bucket", "+Inf"),
        ("wait_seconds_count", None),
        ("wait_seconds_sum", None),
    ]
    assert {sample.start_ms for sample in found} == {1_700_000_000_500}
    assert {sample.family for sample in found} == {
        ("wait_seconds", "histogram", "Time that jobs waited.", "seconds")
    }
    assert [sample.exemplar for sample in found] == [
        ScrapedExemplar((("trace_id", "abc"),), 0.5, None),
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("gauge", ["m 1"]),
        ("counter", ["m_total 1"]),
        ("summary", ['m{quantile="0.5"} 1', "m_count 1", "m_sum 1"]),
        ("gaugehistogram", ['m_bucket{le="+Inf"} 1', "m_gcount 1", "m_gsum 1"]),
        ("info", ['m_info{a="1"} 1']),
        ("stateset", ['m{m="a"} 1', 'm{m="b"} 0']),
        ("unknown", ["m 1"]),
    ],
)
def test_every_kind_of_openmetrics_keeps_its_names(kind: str, lines: list[str]) -> None:
    found = samples("\n".join([f"# TYPE m {kind}", *lines, "# EOF\n"]))

    assert [sample.name for sample in found] == [
        line.partition("{")[0].split()[0] for line in lines
    ]
    assert {sample.family.kind for sample in found} == {kind}


@pytest.mark.parametrize("name", ["jobs", "jobs_total"])
def test_a_counter_of_the_text_format_keeps_its_name(name: str) -> None:
    (sample,) = samples(f"# HELP {name} Jobs.\n# TYPE {name} counter\n{name} 3\n", TEXT)

    assert sample.name == name
    assert sample.family == (name, "counter", "Jobs.", "")


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("-15.5", -15.5),
        ("+Inf", math.inf),
        ("-Inf", -math.inf),
        ("1.7976931348623157e+308", 1.7976931348623157e308),
        ("5e-324", 5e-324),
        ("9" * 400, math.inf),
        ("-" + "9" * 400, -math.inf),
    ],
)
def test_every_number_is_read(written: str, value: float, content_type: str) -> None:
    end = "# EOF\n" if content_type == OPENMETRICS else ""
    (sample,) = samples(f"m {written}\n{end}", content_type)

    assert sample.value == value


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
def test_not_a_number_is_a_value(content_type: str) -> None:
    (sample,) = samples("# TYPE m gauge\nm NaN\n# EOF\n", content_type)

    assert math.isnan(sample.value)


@pytest.mark.parametrize(
    ("line", "content_type"), [("m 1 1700000000.5", OPENMETRICS), ("m 1 1700000000500", TEXT)]
)
def test_a_time_is_in_milliseconds(line: str, content_type: str) -> None:
    (sample,) = samples(f"{line}\n# EOF\n", content_type)

    assert sample.time_ms == 1_700_000_000_500


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("tôi yêu 测试 مرحبا 🚀", "tôi yêu 测试 مرحبا 🚀"),
        ("/api?foo=bar&baz={qux},#1", "/api?foo=bar&baz={qux},#1"),
        (r"a\\b", r"a\b"),
        (r"\"quoted\"", '"quoted"'),
        (r"two\nlines", "two\nlines"),
        ("x" * 10_000, "x" * 10_000),
    ],
)
def test_the_text_of_a_label_is_kept(written: str, value: str, content_type: str) -> None:
    (sample,) = samples(f'# TYPE a:b gauge\na:b{{text="{written}"}} 1\n# EOF\n', content_type)

    assert (sample.name, sample.labels) == ("a:b", (("text", value),))


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
def test_a_help_of_two_lines_is_kept(content_type: str) -> None:
    (sample,) = samples("# HELP m One.\\nTwo.\n# TYPE m gauge\nm 1\n# EOF\n", content_type)

    assert sample.family.help == "One.\nTwo."


def test_a_label_without_a_value_is_none() -> None:
    (sample,) = samples('m{a="",b="1"} 1\n', TEXT)

    assert sample.labels == (("b", "1"),)


@pytest.mark.parametrize(
    "line",
    [
        '# TYPE "a.b" gauge\n{"a.b",c="1"} 1',
        'm{"a.b"="1"} 1',
        "# TYPE m histogram\nm {count:3,sum:1,schema:0,zero_threshold:0,zero_count:0}",
    ],
)
def test_what_cannot_be_sent_is_counted_and_costs_no_other(line: str) -> None:
    found = read(f"{line}\n# TYPE other gauge\nother 2\n# EOF\n")

    assert [sample.name for sample in found.samples] == ["other"]
    assert found.unsendable == 1


@pytest.mark.parametrize(
    ("page", "content_type"),
    [
        ("\n# no metrics\n1234notvali}{ 444\n", TEXT),
        ('# TYPE m gauge\nm{a="1",a="1"} 1.0\n', TEXT),
        ('{label="value"} 1.0\n', TEXT),
        ("m\n", TEXT),
        ("m nan nan\n", TEXT),
        ("# TYPE m nonsense\nm 1\n", TEXT),
        ("m 1\n", OPENMETRICS),  # without an end
        ("# EOF\nm 1\n", OPENMETRICS),
        ("# TYPE m summary\nm 1\n# EOF\n", OPENMETRICS),
        ("m 1 NaN\n# EOF\n", OPENMETRICS),
        ("", OPENMETRICS),
        ("<html></html>", "text/html"),
        ("{}", "application/json"),
    ],
)
def test_what_is_no_exposition_is_one_error(page: str, content_type: str) -> None:
    with pytest.raises(NoExpositionError):
        read(page, content_type)


def test_bytes_that_are_no_text_are_no_exposition() -> None:
    with pytest.raises(NoExpositionError, match="UTF-8"):
        parse_exposition(b"m\xff 1\n", content_type=TEXT, max_samples=9)


def test_more_samples_than_are_taken_are_no_exposition() -> None:
    page = "".join(f"m{number} 1\n" for number in range(4))

    assert len(read(page, TEXT, max_samples=4).samples) == 4
    with pytest.raises(NoExpositionError, match="more than 3 samples"):
        read(page, TEXT, max_samples=3)


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
def test_a_line_that_is_too_long_is_no_exposition(content_type: str) -> None:
    def page(length: int) -> str:
        return "# TYPE m gauge\n" + 'm{a="' + "x" * (length - 10) + '"} 1\n# EOF\n'

    assert len(read(page(MAX_LINE_CHARACTERS), content_type).samples) == 1
    with pytest.raises(NoExpositionError, match="a line has more than 16384 characters"):
        read(page(MAX_LINE_CHARACTERS + 1), content_type)


def test_a_page_that_takes_too_long_is_no_exposition() -> None:
    clock = count(0.0, PARSE_SECONDS / 4)

    with pytest.raises(NoExpositionError, match="takes more than 10 s"):
        parse_exposition(
            b"m 1\n" * 9, content_type=TEXT, max_samples=9, monotonic=lambda: next(clock)
        )
