"""Records to bytes and back: orjson out, msgspec in.

Here live encoding, decoding and the one error message for what does not decode. Unknown fields
are ignored, so that old readers follow new writers. What happens to a bad record is decided
elsewhere (`gpuledger.dead_letters`).
"""

import re
from functools import cache
from typing import Any, Final, Generic, TypeVar

import msgspec
import orjson

from gpuledger.errors import UndecodableError

T = TypeVar("T")
_SHOWN_CHARACTERS: Final = 120
_STEP: Final = re.compile(r"(?P<key>[^.\[\]]+)(?!\])|\[(?P<position>\d+)\]|\[\.\.\.\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")
# RecursionError: thousands of brackets, also in a field that nobody reads, must not stop a stage.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)


def encode(record: object) -> bytes:
    """Encode a record as JSON; absent fields get no key."""
    return orjson.dumps(record)


class Decoder(Generic[T]):
    """Decodes and validates the records of one topic."""

    def __init__(self, *, topic: str, record: type[T]) -> None:
        self.topic = topic
        self._decode = msgspec.json.Decoder(record).decode

    def decode(self, value: bytes | None) -> T:
        """Give the record, or raise `UndecodableError` naming topic, field and value."""
        try:
            return self._decode(value)  # type: ignore[arg-type]  # None is refused below, with the others
        except _UNDECODABLE as error:
            raise UndecodableError(_explain(self.topic, value, error)) from error


@cache
def decoder_of(topic: str, record: type[T]) -> Decoder[T]:
    """Give the decoder of a topic's records; one for each pair, as building one is not cheap."""
    return Decoder(topic=topic, record=record)


def _explain(topic: str, value: bytes | None, error: Exception) -> str:
    if value is None:
        return f"{topic}: no value (a tombstone), but this topic has none"
    what, path = _split_path(str(error))
    if path is None:
        return f"{topic}: not JSON of this topic's record: {what}; value {_shorten(value)}"
    shown = _shorten(_value_at(value, path))
    missing = _MISSING.fullmatch(what)
    if missing:
        where = ".".join(filter(None, [path, missing["field"]]))
        return f"{topic}: field {where}: missing; value {shown}"
    return f"{topic}: field {path or '(the record)'}: {what}; value {shown}"


def _split_path(message: str) -> tuple[str, str | None]:
    """Take msgspec's message apart: ``Expected `int`, got `str` - at `$.gpus[1].index` ``."""
    what, found, path = message.partition(" - at `$")
    if found:
        return what, path.rstrip("`").lstrip(".")
    return what, "" if what.startswith(("Object missing", "Expected `object`")) else None


def _value_at(value: bytes, path: str) -> Any:  # noqa: ANN401  # any JSON value
    """Look up what stands at the path, or the nearest whole around it.

    msgspec writes `[...]` for any key of a mapping: there the mapping is the nearest.
    """
    try:
        found: Any = orjson.loads(value)
        for step in _STEP.finditer(path):
            if step["key"] is not None:
                found = found[step["key"]]
            elif step["position"] is not None:
                found = found[int(step["position"])]
            else:
                break
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return value
    return found


def _shorten(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"
