"""The codec of gRPC messages that are encoded and decoded by hand (`gpuledger.protobuf`)."""

from grpclib.encoding.base import CodecBase
from typing_extensions import override


class BytesCodec(CodecBase):
    """Sends and returns messages as bytes, without encoding or decoding them."""

    __content_subtype__ = "proto"

    @override
    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:
        return message

    @override
    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:
        return data
