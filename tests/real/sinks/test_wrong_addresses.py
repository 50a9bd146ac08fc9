"""The responses of real receivers to requests at a wrong address, and how they are handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.services.certificates import Authority
from tests.real.services.prometheus import SecuredPrometheus
from tests.unit.sinks.remote_write.messages import RawMessage, SampleMessage

if TYPE_CHECKING:
    from pathlib import Path

    from gpuledger_sinks.remote_write.write_client import Payload
    from tests.real.services.prometheus import PrometheusApi
    from tests.real.services.starter import Starter

NO_REQUEST = RawMessage(b"\xff", samples=1)


async def write(url: str, message: Payload) -> None:
    async with open_client(RemoteWriteSettings(url=url)) as client:
        await client.write(message, attempt=0)


@pytest.mark.parametrize("receiver", ["prometheus", "victoria_metrics"])
async def test_a_receiver_accepts_a_request_without_samples_and_rejects_invalid_ones(
    receiver: str, request: pytest.FixtureRequest
) -> None:
    api: PrometheusApi = request.getfixturevalue(receiver)
    await write(api.remote_write_url, RawMessage())
    with pytest.raises(RejectedError):
        await write(api.remote_write_url, NO_REQUEST)


async def test_a_receiver_with_tls_does_not_reject_samples_sent_over_plain_http(
    starter: Starter, prometheus_binary: Path, tmp_path: Path
) -> None:
    authority = Authority(folder=tmp_path / "authority")
    server = starter.start(
        SecuredPrometheus(
            binary=prometheus_binary,
            folder=starter.new_folder("prometheus"),
            authority=authority,
            password="first",
        )
    )
    plain = server.remote_write_url.replace("https://", "http://")
    with pytest.raises(ReceiverUnavailableError, match=r"HTTPS server.*check remote_write\.url"):
        await write(plain, SampleMessage())


@pytest.mark.parametrize("path", ["", "/", "/api/v1/wriet", "/api/v1"])
@pytest.mark.parametrize("receiver", ["prometheus", "victoria_metrics"])
async def test_a_wrong_path_of_a_receiver_rejects_no_sample(
    receiver: str, path: str, request: pytest.FixtureRequest
) -> None:
    api: PrometheusApi = request.getfixturevalue(receiver)
    with pytest.raises(ReceiverUnavailableError, match=r"check remote_write\.url|a page"):
        await write(api.url + path, SampleMessage())
