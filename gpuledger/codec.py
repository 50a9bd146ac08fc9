"""Records to bytes and back.

Here live encoding, decoding, and the validation of what is to be written. Unknown fields are
ignored, so that old readers follow new writers. What an error says is made in
`gpuledger.decode_errors`; what happens to a bad record is decided elsewhere
(`gpuledger.dead_letter_queue`).
"""

from functools import cache
from typing import Final, Generic, TypeVar

import msgspec

from gpuledger.decode_errors import explain, name_fields
from gpuledger.errors import UndecodableError

T = TypeVar("T")
# RecursionError: thousands of brackets, also in a field that nobody reads, must not stop a stage.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)
# Left as they are by `to_builtins`, which would make texts of them, and texts are valid.
_NOT_IN_JSON: Final = (bytes, bytearray, memoryview)

encode: Final = msgspec.json.Encoder().encode
"""Return a record as JSON; absent fields get no key, and `null` in records that are arrays."""


def validate(record: object) -> None:
    """Raise `msgspec.ValidationError`, naming the field, where a value is none that it may have.

    For writers of what others reported; costs about as much as decoding it. msgspec constructs
    Structs without looking at the values, and `convert` returns what is of the right class already
    as it is, so the record is taken apart first.
    """
    try:
        parts = msgspec.to_builtins(record, builtin_types=_NOT_IN_JSON)
    except TypeError as error:  # of a class that msgspec does not know
        raise msgspec.ValidationError(str(error)) from error
    try:
        msgspec.convert(parts, type(record))
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(name_fields(type(record), error)) from error


class Decoder(Generic[T]):
    """Decodes and validates the records of one topic."""

    def __init__(self, *, topic: str, record: type[T]) -> None:
        self.topic = topic
        self._record = record
        self._decode = msgspec.json.Decoder(record).decode

    def decode(self, value: bytes | None) -> T:
        """Return the record, or raise `UndecodableError` naming topic, field and value."""
        try:
            return self._decode(value)  # type: ignore[arg-type]  # None is refused below, with the others
        except _UNDECODABLE as error:
            said = explain(self._record, self.topic, value, error)
            raise UndecodableError(said) from error


@cache
def decoder_of(topic: str, record: type[T]) -> Decoder[T]:
    """Return the decoder of a topic's records; one for each pair, as building one is not cheap."""
    return Decoder(topic=topic, record=record)
