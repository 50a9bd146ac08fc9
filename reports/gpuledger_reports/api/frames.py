"""How a question and its answer travel between the service and a process: a length, then bytes.

A process says that it has taken a question before it works on it: one that ends without that word
has not begun, and another may be asked the same.
"""

from typing import BinaryIO, Final

import msgspec

from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer
from gpuledger_reports.api.questions import Question

HEAD_BYTES: Final = 8
TAKEN: Final = b"?"
"""What a process writes of a question that it has read whole."""
_ENCODER: Final = msgspec.msgpack.Encoder()
SETTINGS: Final = msgspec.msgpack.Decoder(AnswerSettings)
QUESTION: Final = msgspec.msgpack.Decoder(Question)
ANSWER: Final = msgspec.msgpack.Decoder(ReportAnswer)


def framed(content: msgspec.Struct) -> bytes:
    """Return a record with its length before it."""
    payload = _ENCODER.encode(content)
    return len(payload).to_bytes(HEAD_BYTES, "big") + payload


def length_of(head: bytes) -> int:
    """Return how many bytes follow a head."""
    return int.from_bytes(head, "big")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the bytes of the next record; nothing where the other side has ended."""
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    payload = stream.read(length_of(head))
    return payload if len(payload) == length_of(head) else None
