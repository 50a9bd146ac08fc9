"""KEDA's service `externalscaler.ExternalScaler`, on gRPC.

Field numbers are those of KEDA's `pkg/scalers/externalscaler/externalscaler.proto`. ADR 010
explains why generated code is not used.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from h2.settings import SettingCodes
from typing_extensions import override

from gpuledger.grpc_codec import BytesCodec
from gpuledger.protobuf import MessageFields, write_field
from gpuledger_sinks.metrics import SCALER_REQUESTS_TOTAL
from gpuledger_sinks.scaler.workload_use import AbsentError, Metric, UnknownUseError, Workload

MAX_STREAMS: Final = 10_000
"""Maximum number of calls at the same time on one connection. KEDA opens one connection, and keeps
one call open for each ScaledObject."""
T = TypeVar("T")
_SERVICE: Final = "/externalscaler.ExternalScaler/"
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
_Natural = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Trigger(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """The metadata of a trigger in a ScaledObject."""

    target: _Positive
    """Use for each replica."""
    activation_target: _Natural = 0.0
    """Use above which the workload is active."""
    metric: Metric = "gpus"
    """The use: GPUs in use, use as a part of the allocation, or bytes of device memory."""
    owner_kind: str = "Deployment"
    """Kind of the workload."""
    owner_name: str = ""
    """Name of the workload; empty means the name of the ScaledObject."""
    scaler_address: str = ""
    enable_tls: str = msgspec.field(default="", name="enableTLS")
    unsafe_ssl: str = ""


class ScaledObject:
    """A ScaledObject with the trigger for which KEDA calls."""

    def __init__(self, message: MessageFields) -> None:
        """Parse a `ScaledObjectRef`; raises `ValueError` if it is invalid."""
        metadata = {one.text(1): one.text(2) for one in message.messages(3)}
        self.trigger = msgspec.convert(metadata, Trigger, strict=False)
        name = self.trigger.owner_name or message.text(1)
        self.workload = Workload(message.text(2), self.trigger.owner_kind, name)


Use = Callable[[Workload, Metric], float]
"""Returns the use of a workload, or raises `UnknownUseError`."""


class ExternalScaler:
    """The service; `use` is the use of a workload, and `wait` waits until uses may have changed."""

    def __init__(self, *, use: Use, wait: Callable[[], Awaitable[object]]) -> None:
        self._use, self._wait = use, wait

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the methods by path, as grpclib requires."""

        def unary(answer: Callable[[MessageFields], bytes]) -> Handler:
            async def handle(stream: Stream[Any, Any]) -> None:
                message = await stream.recv_message()
                await stream.send_message(
                    _answer_counted(lambda: answer(MessageFields(message or b"")))
                )

            return Handler(handle, Cardinality.UNARY_UNARY, bytes, bytes)

        push = Handler(self._push, Cardinality.UNARY_STREAM, bytes, bytes)
        return {
            f"{_SERVICE}IsActive": unary(self._is_active),
            f"{_SERVICE}StreamIsActive": push,
            f"{_SERVICE}GetMetricSpec": unary(self._metric_spec),
            f"{_SERVICE}GetMetrics": unary(self._metrics),
        }

    def _is_active(self, message: MessageFields) -> bytes:
        return write_field(1, self._activity(ScaledObject(message)))

    def _activity(self, scaled: ScaledObject) -> bool:
        return self._use(scaled.workload, scaled.trigger.metric) > scaled.trigger.activation_target

    def _metric_spec(self, message: MessageFields) -> bytes:
        trigger = ScaledObject(message).trigger
        return write_field(1, write_field(1, trigger.metric) + write_field(3, trigger.target))

    def _metrics(self, message: MessageFields) -> bytes:
        (reference,) = message.messages(1)
        scaled = ScaledObject(reference)
        value = self._use(scaled.workload, scaled.trigger.metric)
        return write_field(1, write_field(1, scaled.trigger.metric) + write_field(3, value))

    async def _push(self, stream: Stream[Any, Any]) -> None:
        """Send `true` each time the workload becomes active; KEDA ignores `false`."""
        message = await stream.recv_message()
        scaled = _answer_counted(lambda: ScaledObject(MessageFields(message or b"")))
        was_active = False
        while True:
            try:
                is_active = self._activity(scaled)
            except AbsentError:
                is_active = False
            except UnknownUseError:
                is_active = was_active
            if is_active and not was_active:
                await stream.send_message(write_field(1, is_active))
            was_active = is_active
            await self._wait()


def _answer_counted(answer: Callable[[], T]) -> T:
    """Return the answer, or raise a `GRPCError`; count the request."""
    status = "ok"
    try:
        return answer()
    except AbsentError as error:
        status = "absent"
        raise GRPCError(Status.NOT_FOUND, str(error)) from error
    except UnknownUseError as error:
        status = "unknown"
        raise GRPCError(Status.UNAVAILABLE, str(error)) from error
    except ValueError as error:
        status = "invalid"
        raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from error
    finally:
        SCALER_REQUESTS_TOTAL.labels(status=status).inc()


class ScalerServer(Server):
    """A gRPC server that accepts more calls at the same time than the 100 of h2."""

    def __init__(self, scaler: ExternalScaler) -> None:
        super().__init__([scaler], codec=BytesCodec())

    @override
    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        made = protocol.connection_made

        def connection_made(transport: Any) -> None:  # noqa: ANN401  # as asyncio's
            made(transport)
            connection = protocol.connection
            connection._connection.update_settings(  # noqa: SLF001  # grpclib has no option for it
                {SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS}
            )
            connection.flush()

        protocol.connection_made = connection_made  # type: ignore[method-assign]  # wraps the method
        return protocol
