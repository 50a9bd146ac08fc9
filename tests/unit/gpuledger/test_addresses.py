"""Addresses are shown without what may be a secret."""

import pytest

from gpuledger.settings.secret import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090/api/v1/write", "http://prometheus:9090/api/v1/write"),
        ("https://user:secret@mimir/api/v1/push?token=x#y", "https://mimir/api/v1/push"),
        ("https://us@er:secret@mimir/push", "https://mimir/push"),
        ("http://[::1]:9090/w?token=a@b", "http://********"),
        ("http://mimir/w?mail=a@b", "http://********"),
        ("http://usr/secret@host:9090/w", "http://********"),
        ("http//usr:secret@host:9090/w", "********@host:9090/w"),
        ("http://host;token=secret", "http://host;********"),
        ("s3://bucket/store", "s3://bucket/store"),
        ("s3://bucket/of@somebody", "s3://********"),
        ("/var/lib/gpuledger/store", "/var/lib/gpuledger/store"),
        ("/var/lib/of@somebody", "/var/lib/of@somebody"),
        ("prometheus", "prometheus"),
        ("usr:sec@ret@one:9092,usr:secret@two:9092", "********@two:9092"),
        ("user:secret@host:9090/w", "********@host:9090/w"),
        ("host/w?token=secret", "host/w"),
        ("http:/user:secret@host/w", "********@host/w"),
        ("s3:///usr:secret@host/x", "s3://********"),
        ("http:///secret@host/x", "http://********"),
        ("file:///var/lib/store", "file:///var/lib/store"),
        ("//usr:secret@host/x", "//********@host/x"),
        ("http://host/w;token=secret", "http://host/w"),
        ("s3://host/w#secret", "s3://host/w"),
        ("host/w;token=secret", "host/w"),
        ("host/w#secret", "host/w"),
        ("", ""),
        ("https://tenant/u:hunter2?x@h.example", "https://********"),
        ("https://admin:hunter2%40api:6443", "https://********"),
        ("https://admin:hunter2\uff20api:6443", "https://********"),
        ("http://admin:hunter2", "http://********"),
        ("http://admin:hunter2@", "http://********"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("sign", ["#", "?", "/", "@", ":", "[", "]"])
@pytest.mark.parametrize("form", ["usr:hunter2{}hunter3@host:9090/w", "usr:2{}hunter2@host/w"])
def test_a_sign_in_a_password_that_is_not_encoded_shows_no_part_of_it(form: str, sign: str) -> None:
    for address in (form.format(sign), f"http://{form.format(sign)}"):
        assert "hunter" not in shown_url(address)
