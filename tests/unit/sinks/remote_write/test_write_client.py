"""Requests as a receiver sees them, and how its responses are interpreted."""

from typing import Any

import msgspec
import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import Secret
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.wire import Version
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.fakes.hostile_http import Raw, answering, page
from tests.unit.sinks.receiver import Answer, Received, receiving
from tests.unit.sinks.remote_write.messages import SampleMessage
from tests.unit.sinks.remote_write.oracle import decompress, parse

ONE_SERIES = SampleMessage()
SERIES = parse(ONE_SERIES.encode(Version.V1))
PAGE = {"Content-Type": "text/html"}


async def write(url: str, *, attempt: int = 0, **changes: Any) -> None:  # noqa: ANN401  # settings
    settings = {"url": f"{url}/api/v1/write", "protocol": "1.0", **changes}
    async with open_client(RemoteWriteSettings(**settings)) as client:
        await client.write(ONE_SERIES, attempt=attempt)


async def received(**options: Any) -> Received:  # noqa: ANN401  # as write() takes them
    async with receiving() as receiver:
        await write(receiver.url, **options)
    return receiver.received[0]


async def test_a_request_has_the_protocols_headers() -> None:
    request = await received()

    assert request.path == "/api/v1/write"
    assert request.headers["Content-Type"] == "application/x-protobuf"
    assert request.headers["Content-Encoding"] == "snappy"
    assert request.headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"
    assert request.headers["User-Agent"].startswith("gpuledger/")
    assert "Retry-Attempt" not in request.headers


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"attempt": 3}, "Retry-Attempt", "3"),
        ({"headers": {"X-Scope-OrgID": "team-a"}}, "X-Scope-OrgID", "team-a"),
        ({"bearer_token": Secret("t0ken\n")}, "Authorization", "Bearer t0ken"),
        (
            {"username": "me", "password": Secret("pass")},
            "Authorization",
            "Basic bWU6cGFzcw==",
        ),
    ],
)
async def test_configured_headers_are_sent(options: dict[str, Any], name: str, value: str) -> None:
    assert (await received(**options)).headers[name] == value


@pytest.mark.parametrize(
    "name", ["Content-Type", "user-agent", "X-PROMETHEUS-Remote-Write-Version"]
)
def test_the_protocols_headers_cannot_be_overridden(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"headers: reserved header: {name}"):
        msgspec.convert({"headers": {name: "x"}}, RemoteWriteSettings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "localhost:9090"}, "must begin with http"),
        ({"username": "me"}, "username and password belong together"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, str], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, RemoteWriteSettings)


@pytest.mark.parametrize("status", [200, 204])
async def test_any_2xx_means_accepted_whatever_the_body(status: int) -> None:
    async with receiving(Answer(status, "" if status == 204 else "error: not really")) as receiver:
        await write(receiver.url)

    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "status", [429, 500, 503, 302, 401, 403, 404, 405, 407, 408, 410, 415, 421, 425, 426, 451]
)
async def test_a_response_that_does_not_reject_the_samples_themselves_is_retried(
    status: int,
) -> None:
    async with receiving(Answer(status, "later", {"Retry-After": "7"})) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=f"{status} later") as caught:
            await write(receiver.url)

    assert caught.value.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("answer", "output"),
    [
        (Answer(302, "", {"Location": "https://usr:pw@sso/in?t=1"}), "redirect to https://sso/in,"),
        (Answer(308), "redirect to nowhere, which is not followed; check remote_write.url"),
        (Answer(408), "408$"),
        (Answer(425), "425$"),
        (Answer(404), "check remote_write.url"),
    ],
)
async def test_a_response_is_reported_with_the_setting_to_check(
    answer: Answer, output: str
) -> None:
    """Temporary failures name no setting; a redirect names its target."""
    async with receiving(answer) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=output):
            await write(receiver.url)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_status_that_the_settings_declare_final_rejects_the_samples_immediately(
    status: int,
) -> None:
    async with receiving(Answer(status, "not here")) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url, final_statuses=[status])

    assert str(caught.value) == f"{status} not here"
    assert len(receiver.received) == 1


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_samples_are_rejected_if_the_receiver_accepts_a_request_without_any(
    status: int,
) -> None:
    refused = Answer(status, "invalid label\n")
    async with receiving(refused, Answer(204), refused) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url)

    assert str(caught.value) == f"{status} invalid label"
    sent = [parse(decompress(request.body)) for request in receiver.received]
    assert sent == [SERIES, [], SERIES]


async def test_samples_that_another_server_rejected_are_accepted_once_it_is_gone() -> None:
    async with receiving(Answer(400, "unsupported path requested")) as receiver:
        await write(receiver.url)

    sent = [parse(decompress(request.body)) for request in receiver.received]
    assert sent == [SERIES, [], SERIES]


async def test_a_sample_that_is_out_of_order_is_rejected_without_a_second_request() -> None:
    async with receiving(Answer(400, "out of order sample\n")) as receiver:
        with pytest.raises(RejectedError, match="400 out of order sample"):
            await write(receiver.url)

    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(400, "unsupported path requested"), id="another server"),
        pytest.param(Answer(413, "<html>", PAGE), id="a proxy that rejects everything"),
        pytest.param(Answer(401, "who are you?"), id="a login is required"),
        pytest.param(Answer(503, "away"), id="unavailable"),
    ],
)
async def test_no_sample_is_rejected_if_a_request_without_samples_is_rejected_too(
    answer: Answer,
) -> None:
    refused = Answer(400, "bad request")
    async with receiving(refused, answer) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=f"{receiver.url}.*{answer.text}"):
            await write(receiver.url)


@pytest.mark.parametrize("status", [200, 400, 422])
async def test_an_html_page_is_not_a_receivers_response(status: int) -> None:
    async with receiving(Answer(status, "<html>Please log in</html>", PAGE)) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=r"remote_write\.url|a page"):
            await write(receiver.url)


async def test_a_response_without_a_content_type_is_not_a_receivers_response() -> None:
    """Go's servers answer plain HTTP on a TLS port this way."""
    output = "Client sent an HTTP request to an HTTPS server."
    plain = Raw(begin=b"HTTP/1.0 400 Bad Request\r\n\r\n" + output.encode())
    taken = page(b"", status=b"HTTP/1.1 204 No Content\r\n")
    async with answering([plain, taken]) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=rf"{output}; check remote_write\.url"):
            await write(receiver.url)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (
            401,
            (
                "check the credentials (remote_write.username and .password, .bearer_token, .oauth"
                " or .sigv4)"
            ),
        ),
        (404, "check remote_write.url (scheme, host, port and path)"),
    ],
)
async def test_a_rejection_is_reported_with_the_address_and_the_setting(
    status: int, remedy: str
) -> None:
    async with receiving(Answer(status, "no")) as receiver:
        with pytest.raises(ReceiverUnavailableError) as caught:
            await write(receiver.url)

    assert str(caught.value) == f"{receiver.url}/api/v1/write: {status} no; {remedy}"


async def test_a_receiver_that_does_not_answer_is_retried() -> None:
    async with receiving() as receiver:
        url = receiver.url
    with pytest.raises(ReceiverUnavailableError, match=url):
        await write(url)


async def test_a_missing_ca_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"remote_write\.ca_file: cannot read /missing\.pem"):
        await write("https://localhost", ca_file="/missing.pem")
