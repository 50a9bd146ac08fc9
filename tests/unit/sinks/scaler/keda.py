"""A client that calls the scaler as KEDA does, with Protocol Buffers' own encoding."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod

from gpuledger.grpc_codec import BytesCodec
from tests.unit.sinks.scaler.external_scaler_oracle import MESSAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_SERVICE = "/externalscaler.ExternalScaler"


def reference(
    metadata: Mapping[str, str], *, name: str = "train", namespace: str = "research"
) -> Any:  # noqa: ANN401  # a message
    found = [MESSAGES["Metadata"](key=key, value=value) for key, value in metadata.items()]
    return MESSAGES["ScaledObjectRef"](name=name, namespace=namespace, scalerMetadata=found)


class Keda:
    """Calls the scaler over one connection."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def _call(self, method: str, request: Any, answer: str) -> Any:  # noqa: ANN401  # messages
        call = UnaryUnaryMethod[bytes, bytes](self._channel, f"{_SERVICE}/{method}", bytes, bytes)
        return MESSAGES[answer].FromString(await call(request.SerializeToString()))

    async def metrics(self, of: Any) -> dict[str, float]:  # noqa: ANN401  # a message
        request = MESSAGES["GetMetricsRequest"](scaledObjectRef=of, metricName="ignored")
        found = await self._call("GetMetrics", request, "GetMetricsResponse")
        return {one.metricName: one.metricValueFloat for one in found.metricValues}

    async def spec(self, of: Any) -> dict[str, float]:  # noqa: ANN401  # a message
        found = await self._call("GetMetricSpec", of, "GetMetricSpecResponse")
        return {one.metricName: one.targetSizeFloat for one in found.metricSpecs}

    async def is_active(self, of: Any) -> bool:  # noqa: ANN401  # a message
        return bool((await self._call("IsActive", of, "IsActiveResponse")).result)

    @asynccontextmanager
    async def pushed(self, of: Any) -> AsyncIterator[AsyncIterator[bool]]:  # noqa: ANN401  # a message
        """Open a stream of activations."""
        method = UnaryStreamMethod[bytes, bytes](
            self._channel, f"{_SERVICE}/StreamIsActive", bytes, bytes
        )
        async with method.open() as stream:
            await stream.send_message(of.SerializeToString(), end=True)

            async def results() -> AsyncIterator[bool]:
                async for one in stream:
                    yield MESSAGES["IsActiveResponse"].FromString(one).result

            yield results()
            await stream.cancel()


@asynccontextmanager
async def connected(**to: Any) -> AsyncIterator[Keda]:  # noqa: ANN401  # the channel's arguments
    channel = Channel(codec=BytesCodec(), **to)
    try:
        yield Keda(channel)
    finally:
        channel.close()
