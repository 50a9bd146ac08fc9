"""Makes gRPC calls over a Unix socket, with grpclib; imported only if a kubelet is queried."""

from pathlib import Path
from typing import Final

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from typing_extensions import override

from gpuledger.grpc_codec import BytesCodec
from gpuledger.texts import readable
from gpuledger_agent.host.kubelet.messages import KubeletError

_REASONS: Final = {
    Status.UNIMPLEMENTED: "unimplemented",
    Status.DEADLINE_EXCEEDED: "deadline",
    Status.RESOURCE_EXHAUSTED: "exhausted",
}


class _BoundedChannel(Channel):
    """A connection that is closed if it receives more than `max_bytes`.

    grpclib does not limit the size of responses.
    """

    def __init__(self, socket: Path, *, max_bytes: int) -> None:
        super().__init__(path=str(socket), codec=BytesCodec())
        self._left_bytes = max_bytes
        self.overran = False

    @override
    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        receive = protocol.data_received

        def receive_bounded(data: bytes) -> None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                self.overran = True
                self.close()
            else:
                receive(data)

        protocol.data_received = receive_bounded  # type: ignore[method-assign]  # wraps the method
        return protocol


async def call_kubelet(
    socket: Path, method: str, *, timeout_seconds: float, max_bytes: int
) -> bytes:
    """Call a method of the kubelet without arguments, and return the response.

    Raises `KubeletError`, `OSError` or `TimeoutError`.
    """
    channel = _BoundedChannel(socket, max_bytes=max_bytes)
    try:
        call = UnaryUnaryMethod(channel, method, bytes, bytes)
        return await call(b"", timeout=timeout_seconds)
    except GRPCError as error:
        detail = f"{error.status.name}: {readable(error.message or '')}"
        raise KubeletError(_REASONS.get(error.status, "error"), detail) from error
    except StreamTerminatedError as error:
        if channel.overran:
            detail = f"the response is larger than {max_bytes} bytes"
            raise KubeletError("too_large", detail) from error
        raise KubeletError("broken", str(error)) from error
    except (OSError, TimeoutError):
        raise
    except Exception as error:
        # If the peer does not use HTTP/2, grpclib and h2 may raise any of their errors.
        raise KubeletError("broken", readable(f"{type(error).__name__}: {error}")) from error
    finally:
        # Close even if the call was cancelled, so that a timeout leaves no open connection.
        channel.close()
