"""Records to bytes and back, by way of their twins.

Here live encoding and decoding. Unknown fields are ignored, so that old readers follow new writers.
What an error says is made in `gpuledger.decode_errors`; what happens to a bad record is decided
elsewhere (`gpuledger.dead_letter_queue`).
"""

from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from gpuledger.decode_errors import explain
from gpuledger.errors import UndecodableError
from gpuledger.twins import encode_twin, twin_of

T = TypeVar("T")
# RecursionError: thousands of brackets, also in a field that nobody reads, must not stop a stage.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)


def encode(record: object) -> bytes:
    """Encode a record as JSON; absent fields get no key, and `null` in records that are arrays.

    Raises `msgspec.ValidationError` where a value is none that its field may have.
    """
    if not is_dataclass(record):
        return encode_twin(record)
    twin: type = twin_of(type(record))
    return encode_twin(msgspec.convert(record, twin, from_attributes=True))


class Decoder(Generic[T]):
    """Decodes and validates the records of one topic, as dataclasses or as twins."""

    def __init__(self, *, topic: str, record: type[T]) -> None:
        self.topic = topic
        self._record = record
        self._is_twin = not is_dataclass(record)
        self._wire: Any = record if self._is_twin else twin_of(cast("Any", record))
        self._decode = msgspec.json.Decoder(self._wire).decode

    def decode(self, value: bytes | None) -> T:
        """Return the record, or raise `UndecodableError` naming topic, field and value."""
        try:
            found: T = self._decode(value)  # type: ignore[arg-type]  # None is refused below, with the others
        except _UNDECODABLE as error:
            said = explain(self._wire, self.topic, value, error)
            raise UndecodableError(said) from error
        if self._is_twin:
            return found
        return msgspec.convert(found, self._record, from_attributes=True)


@cache
def decoder_of(topic: str, record: type[T]) -> Decoder[T]:
    """Return the decoder of a topic's records; one for each pair, as building one is not cheap."""
    return Decoder(topic=topic, record=record)
