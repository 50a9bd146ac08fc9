"""However a server writes Retry-After, the wait is a bounded number of seconds."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.runtime.http.client import MAX_SECONDS, retry_after_seconds

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
DATE = "Sat, 21 Nov 2026 12:00:30 GMT"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("5", 5.0),
        ("0.5", 0.5),
        ("", 0.0),
        ("soon", 0.0),
        ("-3", 0.0),
        ("-1e300", 0.0),
        ("nan", 0.0),
        ("-inf", 0.0),
        ("inf", MAX_SECONDS),
        ("1e9", MAX_SECONDS),
        ("1e300", MAX_SECONDS),
        ("9" * 6000, MAX_SECONDS),
        ("\udcff", 0.0),
        (DATE, 30.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0.0),
        ("Sat, 21 Nov 2026 12:00:30", 0.0),  # a date without a time zone is ambiguous
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_SECONDS),
        ("Sat, 21 Nov 99999 12:00:30 GMT", 0.0),
        ("Sat, 21 Nov 99999999999999999999 12:00:30 GMT", 0.0),
        ("Sat, 99 Nov 2026 99:99:99 GMT", 0.0),
        ("Sat, 21 Nov 2026 12:00:30 +9999", 0.0),
        ("Sat, 21 Nov 2026 12:00:30 -99999999999999999999", 0.0),
    ],
)
def test_a_wait_is_read_in_both_forms_and_bounded(header: str, seconds: float) -> None:
    assert retry_after_seconds(header, now=NOW) == seconds


@given(st.text() | st.text(alphabet=f"{DATE},+-:9e.\udcff"))
def test_any_header_gives_a_bounded_wait(header: str) -> None:
    assert 0 <= retry_after_seconds(header, now=NOW) <= MAX_SECONDS


@given(st.integers(0, len(DATE)), st.integers(0, len(DATE)), st.text(max_size=9))
def test_no_damaged_date_raises_an_error(begin: int, end: int, instead: str) -> None:
    header = DATE[:begin] + instead + DATE[end:]
    assert 0 <= retry_after_seconds(header, now=NOW) <= MAX_SECONDS
