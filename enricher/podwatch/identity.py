"""Which pod it is that cannot be read: by decoding that alone, else by looking at its begin. Pure.

The API server writes name, namespace, UID and version first, before anything that a tenant writes.
"""

import re
from typing import Final

import msgspec
from msgspec import Raw

from enricher.podwatch.depth import decode_cut
from enricher.podwatch.line_splitter import HEAD_BYTES
from enricher.podwatch.objects import IdentityMeta, IdentityOnly

_decode: Final = msgspec.json.Decoder(IdentityOnly).decode
_METADATA: Final = b'"metadata"'


def identity_of(data: bytes | Raw) -> IdentityMeta:
    """Return what can be found of which pod JSON tells; what cannot is empty."""
    try:
        return decode_cut(_decode, data).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _found_in(bytes(data)[:HEAD_BYTES])


def _found_in(head: bytes) -> IdentityMeta:
    metadata = head.partition(_METADATA)[2]
    return IdentityMeta(
        uid=_value(metadata, b"uid"),
        name=_value(metadata, b"name"),
        namespace=_value(metadata, b"namespace"),
        resource_version=_value(metadata, b"resourceVersion"),
    )


def _value(metadata: bytes, name: bytes) -> str:
    found = re.search(rb'"' + name + rb'":\s*"([A-Za-z0-9.-]{1,253})"', metadata)
    return found[1].decode() if found else ""
