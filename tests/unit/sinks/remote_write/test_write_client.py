"""What a receiver sees of us, and how its answers are read."""

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


async def test_a_request_carries_the_protocols_headers() -> None:
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
async def test_what_is_set_is_sent(options: dict[str, Any], name: str, value: str) -> None:
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
def test_settings_that_cannot_work_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, RemoteWriteSettings)


@pytest.mark.parametrize("status", [200, 204])
async def test_any_2xx_is_taken_whatever_it_says(status: int) -> None:
    async with receiving(Answer(status, "" if status == 204 else "error: not really")) as receiver:
        await write(receiver.url)

    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "status", [429, 500, 503, 302, 401, 403, 404, 405, 407, 408, 410, 415, 421, 425, 426, 451]
)
async def test_what_does_not_refuse_the_samples_themselves_is_to_be_tried_again(
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
async def test_what_is_answered_says_where_to_look(answer: Answer, output: str) -> None:
    """What passes by itself says nothing of the settings; a redirect names where it leads."""
    async with receiving(answer) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=output):
            await write(receiver.url)


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_the_settings_say_is_final_refuses_the_samples_at_once(status: int) -> None:
    async with receiving(Answer(status, "not here")) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url, final_statuses=[status])

    assert str(caught.value) == f"{status} not here"
    assert len(receiver.received) == 1


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_samples_are_refused_where_the_receiver_takes_a_request_without_any(
    status: int,
) -> None:
    refused = Answer(status, "invalid label\n")
    async with receiving(refused, Answer(204), refused) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url)

    assert str(caught.value) == f"{status} invalid label"
    sent = [parse(decompress(request.body)) for request in receiver.received]
    assert sent == [SERIES, [], SERIES]


async def test_samples_that_another_server_refused_are_taken_once_it_is_gone() -> None:
    async with receiving(Answer(400, "unsupported path requested")) as receiver:
        await write(receiver.url)

    sent = [parse(decompress(request.body)) for request in receiver.received]
    assert sent == [SERIES, [], SERIES]


async def test_a_sample_that_is_said_to_be_out_of_order_is_refused_without_asking_again() -> None:
    async with receiving(Answer(400, "out of order sample\n")) as receiver:
        with pytest.raises(RejectedError, match="400 out of order sample"):
            await write(receiver.url)

    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(400, "unsupported path requested"), id="another server's word"),
        pytest.param(Answer(413, "<html>", PAGE), id="a proxy that lets nothing through"),
        pytest.param(Answer(401, "who are you?"), id="a login that is asked for"),
        pytest.param(Answer(503, "away"), id="away"),
    ],
)
async def test_where_a_request_without_samples_is_refused_as_well_no_sample_was(
    answer: Answer,
) -> None:
    refused = Answer(400, "bad request")
    async with receiving(refused, answer) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=f"{receiver.url}.*{answer.text}"):
            await write(receiver.url)


@pytest.mark.parametrize("status", [200, 400, 422])
async def test_a_page_for_people_is_no_receivers_word(status: int) -> None:
    async with receiving(Answer(status, "<html>Please log in</html>", PAGE)) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=r"remote_write\.url|a page"):
            await write(receiver.url)


async def test_an_answer_that_does_not_say_what_it_is_is_no_receivers_word() -> None:
    """Go's servers answer so, and others not, who speaks plain HTTP at a port for TLS."""
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
async def test_what_is_shown_of_a_refusal_names_the_address_and_the_setting(
    status: int, remedy: str
) -> None:
    async with receiving(Answer(status, "no")) as receiver:
        with pytest.raises(ReceiverUnavailableError) as caught:
            await write(receiver.url)

    assert str(caught.value) == f"{receiver.url}/api/v1/write: {status} no; {remedy}"


async def test_a_receiver_that_does_not_answer_is_to_be_tried_again() -> None:
    async with receiving() as receiver:
        url = receiver.url
    with pytest.raises(ReceiverUnavailableError, match=url):
        await write(url)


async def test_a_missing_ca_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"remote_write\.ca_file: cannot read /missing\.pem"):
        await write("https://localhost", ca_file="/missing.pem")
