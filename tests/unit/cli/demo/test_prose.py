"""Sentences are wrapped to the screen without breaking words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_cli.demo.tables import elide, fold, wrap

ALERT = (
    "! GpuIncident critical  GPU 3 on node gpu-node-2 (pod vision/transcode-6b8f4-9wkzp): "
    "XID 79, GPU has fallen off the bus"
)
WIDTHS = [30, 40, 60, 80, 100, 118]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_sentence_is_wrapped_between_words(width: int) -> None:
    lines = fold(ALERT, width=width, indent="  ")
    words = ALERT.split()
    assert max(map(len, lines)) <= width
    assert [word for line in lines for word in line.split()] == words or width <= 30
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_sentence_that_fits_is_unchanged() -> None:
    """Even if words are separated by more than one space."""
    assert fold(ALERT, width=len(ALERT), indent="  ") == [ALERT]


def test_a_word_wider_than_the_screen_is_shortened_like_a_name() -> None:
    assert fold("of (pod vision/transcode-6b8f4-9wkzp):", width=20, indent="  ") == [
        "of (pod",
        "  visi…/tran…9wkzp):",
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sentence_limited_to_one_line_keeps_its_first_and_last_words(width: int) -> None:
    line = elide(ALERT, width=width)
    first, last = line.split(" … ")
    assert len(line) <= width
    assert ALERT.startswith(f"{first} ")
    assert ALERT.endswith(f" {last}")


@given(text=st.text("ab /", max_size=90), width=st.integers(min_value=1, max_value=90))
def test_no_line_is_wider_than_the_screen(text: str, width: int) -> None:
    assert len(elide(text, width=width)) <= width
    assert all(len(line) <= max(width, 3) for line in fold(text, width=width, indent="  "))


def test_facts_are_wrapped_only_between_facts() -> None:
    assert wrap(["one fact", "another", "a third one"], width=18) == [
        "one fact  another",
        "a third one",
    ]
    assert wrap(["kafka.research.svc:9092"], width=12) == ["kafk…vc:9092"]
    assert wrap(["a fact that is long", "two"], width=12) == ["a fact that", "is long  two"]
