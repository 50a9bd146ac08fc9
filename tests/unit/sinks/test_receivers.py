"""Receivers are shown without what may be a secret."""

import pytest

from sinks.receivers import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090/api/v1/write", "http://prometheus:9090/api/v1/write"),
        ("https://user:secret@mimir/api/v1/push?token=x#y", "https://mimir/api/v1/push"),
        ("s3://bucket/store", "s3://bucket/store"),
        ("/var/lib/gpuledger/store", "/var/lib/gpuledger/store"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown
