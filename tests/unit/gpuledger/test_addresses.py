"""Addresses are shown without anything that may be a secret."""

import pytest

from gpuledger.settings.secret import MASK, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090/api/v1/write", "http://prometheus:9090/api/v1/write"),
        ("https://user:secret@mimir/api/v1/push?token=x#y", "https://mimir/api/v1/push"),
        ("https://us@er:secret@mimir/push", "https://mimir/push"),
        ("https://user:secret@[::1]:9090/w;token=secret", "https://[::1]:9090/w"),
        ("http://host:9090", "http://host:9090"),
        ("s3://bucket/store", "s3://bucket/store"),
        ("s3://host/w#secret", "s3://host/w"),
        ("file:///var/lib/store", "file:///var/lib/store"),
        ("/var/lib/of@somebody", "/var/lib/of@somebody"),
        ("prometheus", "prometheus"),
        ("prometheus:9090/w", "prometheus:9090/w"),
        ("", ""),
        # Addresses that cannot be parsed are not shown.
        ("http://mimir/w?mail=a@b", MASK),
        ("http://usr/secret@host:9090/w", MASK),
        ("http//usr:secret@host:9090/w", MASK),
        ("http://host;token=secret", MASK),
        ("s3://bucket/of@somebody", MASK),
        ("usr:secret@one:9092,usr:secret@two:9092", MASK),
        ("user:secret@host:9090/w", MASK),
        ("user:secret", MASK),
        ("host/w?token=secret", MASK),
        ("http:/user:secret@host/w", MASK),
        ("s3:///usr:secret@host/x", MASK),
        ("http:///secret", MASK),
        ("//usr:secret@host/x", MASK),
        ("https://tenant/u:hunter2?x@h.example", MASK),
        ("https://admin:hunter2%40api:6443", MASK),
        ("https://admin:hunter2\uff20api:6443", MASK),
        ("http://admin:hunter2", MASK),
        ("http://[hunter2/x", MASK),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("sign", ["#", "?", "/", "@", ":", "[", "]"])
@pytest.mark.parametrize("form", ["usr:hunter2{}hunter3@host:9090/w", "usr:2{}hunter2@host/w"])
def test_an_unencoded_character_in_a_password_reveals_no_part_of_it(form: str, sign: str) -> None:
    for address in (form.format(sign), f"http://{form.format(sign)}"):
        assert "hunter" not in shown_url(address)
