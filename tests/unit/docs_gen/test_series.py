"""The generated sections of alerts: annotations of rules become Markdown."""

import pytest

from tests.docs_gen.series_page import alerts_page, rules_by_group, series_page, shown

MARKS = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("alerts", "rules"))


@pytest.mark.parametrize(
    ("annotation", "markdown"),
    [
        ("see spool_usable in /readyz", "See `spool_usable` in `/readyz`"),
        ("raise spool.max_bytes.", "Raise `spool.max_bytes`."),
        ("see the `pods.api` check and `node_name`", "See the `pods.api` check and `node_name`"),
        ("busy (docs/guides/a-b.md)", "Busy ([a-b](../guides/a-b.md))"),
        ("in /proc (docs/xids.md#some_code)", "In `/proc` ([xids](../xids.md#some_code))"),
        ("GPU {{ $labels.gpu_index }} of {{ $labels.node }}", "GPU `gpu_index` of `node`"),
        ("podwatch is here", "podwatch is here"),
        ("{{ $value | humanizePercentage }} busy", "`value` busy"),
    ],
)
def test_an_annotation_has_code_links_and_names_of_labels(annotation: str, markdown: str) -> None:
    assert shown(annotation) == markdown


def test_every_rule_is_listed_and_described_without_templates() -> None:
    page = alerts_page(MARKS)

    for rule in (rule for rules in rules_by_group().values() for rule in rules):
        name = rule["alert"]
        assert f"| [{name}](#{name.lower()}) | {rule['labels']['severity']} |" in page
        assert f"### {name}\n" in page
        assert rule["expr"] in page
    assert "{{" not in page


def test_a_page_keeps_the_text_around_its_tables() -> None:
    names = ("series", "counters", "health", "dcgm")
    page = "".join(f"before {name} <!-- {name}: begin --><!-- {name}: end -->" for name in names)

    assert all(f"before {name} " in series_page(page) for name in names)
