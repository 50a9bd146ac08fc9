"""Podwatch keeps only the configured annotations."""

import pytest

from gpuledger.records import PodRecord
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from tests.errors import has_words
from tests.unit.enricher.podwatch.builders import Object, encoded, pod, reader_of


def read(item: Object, *, annotations: list[str]) -> PodRecord:
    reader = reader_of(annotations=annotations)
    found = reader.read(encoded(item))
    assert found is not None
    return found


NOTES = {"team.example/ticket": "T-1", "owner": "ada", "noise": "x" * 1000}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ([], None),
        (["absent"], None),
        (["owner"], {"owner": "ada"}),
        (
            ["team.example/ticket", "absent", "owner"],
            {"team.example/ticket": "T-1", "owner": "ada"},
        ),
        (["owner", "owner"], {"owner": "ada"}),
        (["kubernetes.io/config.hash"], {"kubernetes.io/config.hash": "h"}),
    ],
)
def test_only_the_configured_annotations_are_kept(
    requested: list[str], expected: dict[str, str] | None
) -> None:
    item = pod(metadata={"annotations": NOTES | {"kubernetes.io/config.hash": "h"}})
    found = read(item, annotations=requested)
    assert found.annotations == expected


def test_pods_without_annotations_have_none_of_the_configured_ones() -> None:
    assert read(pod(), annotations=["owner"]).annotations is None


def test_no_setting_keeps_all_annotations() -> None:
    with pytest.raises(ValueError, check=has_words("annotations", "*")):
        PodwatchSettings(annotations=["owner", "*"])
