"""Signatures equal those of AWS: the vectors of its test suite, and the requests with them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpuledger_sinks.sigv4 import AwsKeys, signature_headers

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
URL = "https://example.amazonaws.com/"
AT = datetime(2015, 8, 30, 12, 36, tzinfo=UTC).timestamp()
TOKEN = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"
STS_TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfI"
    "eoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0"
    "wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDry"
    "pNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
FORM = {
    "Content-Type": "application/x-www-form-urlencoded",
    "Content-Length": "13",
    "x-amz-content-sha256": "9095672bbd1f56dfc5b65f3e153adc8731a4a654192329106275f4c7b24d0b6e",
}
UNRESERVED = "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TRIMMED = {"My-Header1": " value1", "My-Header2": ' "a   b   c"'}


# aws-c-auth, tests/aws-signing-test-suite/v4: `header-signed-request.txt` of each directory.
@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "token", "names", "signature"),
    [
        pytest.param(
            *("POST", "", {}, b"", "", "host;x-amz-date"),
            "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            id="post-vanilla",
        ),
        pytest.param(
            *("POST", "", {"My-Header1": "value1"}, b"", "", "host;my-header1;x-amz-date"),
            "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
            id="post-header-key-sort",
        ),
        pytest.param(
            *("POST", "", FORM, b"Param1=value1", ""),
            "content-length;content-type;host;x-amz-content-sha256;x-amz-date",
            "d3875051da38690788ef43de4db0d8f280229d82040bfac253562e56c3f20e0b",
            id="post-x-www-form-urlencoded",
        ),
        pytest.param(
            *("POST", "", {}, b"", STS_TOKEN, "host;x-amz-date;x-amz-security-token"),
            "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
            id="post-sts-header-before",
        ),
        pytest.param(
            *("GET", "", {}, b"", TOKEN, "host;x-amz-date;x-amz-security-token"),
            "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8",
            id="get-vanilla-with-session-token",
        ),
        pytest.param(
            *("GET", UNRESERVED, {}, b"", "", "host;x-amz-date"),
            "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
            id="get-unreserved",
        ),
        pytest.param(
            *("GET", "", TRIMMED, b"", "", "host;my-header1;my-header2;x-amz-date"),
            "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
            id="get-header-value-trim",
        ),
    ],
)
def test_a_signature_equals_that_of_the_published_vector(  # noqa: PLR0917  # the parts of a vector
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    token: str,
    names: str,
    signature: str,
) -> None:
    keys = AwsKeys(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET, session_token=token)
    found = signature_headers(
        f"{URL}{path}",
        body,
        keys=keys,
        region="us-east-1",
        service="service",
        time_seconds=AT,
        headers=headers,
        method=method,
    )
    assert found.pop("Authorization") == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request,"
        f" SignedHeaders={names}, Signature={signature}"
    )
    sent = {"X-Amz-Date": "20150830T123600Z"}
    assert found == (sent | {"X-Amz-Security-Token": token} if token else sent)


@pytest.mark.parametrize("port", ["", ":443"])
def test_the_signed_host_is_the_one_that_is_sent(port: str) -> None:
    keys = AwsKeys(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET)
    found = {
        signature_headers(url, b"", keys=keys, region="r", service="s", time_seconds=AT)[
            "Authorization"
        ]
        for url in (f"https://a.test{port}/x", f"https://u:p@A.test{port}/x")
    }
    other = signature_headers(
        "https://a.test:8443/x", b"", keys=keys, region="r", service="s", time_seconds=AT
    )
    assert len(found) == 1
    assert other["Authorization"] not in found


def test_keys_do_not_show_their_secrets() -> None:
    keys = AwsKeys(access_key_id="AKID", secret_access_key=SECRET, session_token=TOKEN)
    assert SECRET not in repr(keys)
    assert TOKEN not in repr(keys)
