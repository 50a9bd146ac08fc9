"""The fields of a record that are not absent."""

import msgspec


def present_in(record: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a record that are not absent, by name."""
    named = msgspec.structs.asdict(record)
    return {name: value for name, value in named.items() if value is not None}
