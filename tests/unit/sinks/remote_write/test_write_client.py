"""What a receiver sees of us, and how its answers are read."""

from typing import Any

import msgspec
import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import Secret
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.remote_write.write_client import open_client
from sinks.settings import RemoteWriteSettings
from tests.unit.sinks.receiver import Answer, Received, receiving
from tests.unit.sinks.remote_write.oracle import WriteRequest

EMPTY = WriteRequest().SerializeToString()


async def write(url: str, *, attempt: int = 0, **settings: Any) -> None:  # noqa: ANN401  # settings
    async with open_client(RemoteWriteSettings(url=f"{url}/api/v1/write", **settings)) as client:
        await client.write(EMPTY, attempt=attempt)


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
    with pytest.raises(msgspec.ValidationError, match=rf"headers: {name} is the sender's own"):
        msgspec.convert({"headers": {name: "x"}}, RemoteWriteSettings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "localhost:9090"}, "must begin with http"),
        ({"username": "me"}, "username and password go together"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, RemoteWriteSettings)


@pytest.mark.parametrize("status", [200, 204])
async def test_any_2xx_is_taken_whatever_it_says(status: int) -> None:
    async with receiving(Answer(status, "" if status == 204 else "error: not really")) as receiver:
        await write(receiver.url)


@pytest.mark.parametrize("status", [429, 500, 503, 302, 401, 403, 404])
async def test_what_does_not_refuse_the_samples_themselves_is_to_be_tried_again(
    status: int,
) -> None:
    async with receiving(Answer(status, "later", {"Retry-After": "7"})) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=f"{status} later") as caught:
            await write(receiver.url)

    assert caught.value.retry_after_seconds == 7


@pytest.mark.parametrize("status", [400, 409, 415, 422])
async def test_other_4xx_are_final_with_the_receivers_own_words(status: int) -> None:
    async with receiving(Answer(status, "out of order sample\n")) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url)

    assert str(caught.value) == f"{status} out of order sample"


async def test_a_receiver_that_does_not_answer_is_to_be_tried_again() -> None:
    async with receiving() as receiver:
        url = receiver.url
    with pytest.raises(ReceiverUnavailableError, match=url):
        await write(url)


async def test_a_missing_ca_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"remote_write\.ca_file: cannot read /missing\.pem"):
        await write("https://localhost", ca_file="/missing.pem")
