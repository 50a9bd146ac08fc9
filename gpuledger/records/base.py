"""Base of all records: they are frozen and keyword-only, and leave out unknown values.

This module holds the base classes of all records and of extensible enumerations, the types of
whole numbers, and the bounds of the fields that identify a tick: cluster, node, boot and `seq`.
Decoding enforces these bounds. Records themselves and encoding live elsewhere.

Each record repeats `frozen` and `kw_only`, because msgspec inherits only one of the two and type
checkers inherit neither.
"""

from enum import StrEnum
from typing import Annotated, Final, Self

import msgspec
from typing_extensions import override

# An integer beyond 64 bits can be decoded but never encoded again, and Python would read a
# position of -1 as the last one.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# The store keeps these in 32 bits.
SmallNatural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MAX_SEQ: Final = 10 * 366 * 86_400_000
"""Ten years in milliseconds: longer than any kernel runs."""
# Ticks of a boot with a `seq` up to the highest one so far count as repeated. One impossible `seq`
# would therefore make all later ticks of that boot count as repeated.
Seq = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
MAX_NODE_NAME_LENGTH: Final = 253
# In Python, unlike in JSON Schema, `$` also matches before a trailing newline.
NODE_NAME_PATTERN: Final = (
    r"^[A-Za-z0-9]([-_A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-_A-Za-z0-9]*[A-Za-z0-9])?)*$(?!\n)"
)
"""Kubernetes' rule for node names, a DNS-1123 subdomain, plus the capitals and underscores that
hostnames outside Kubernetes may have."""
NodeName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=MAX_NODE_NAME_LENGTH, pattern=NODE_NAME_PATTERN),
]
MAX_CLUSTER_NAME_LENGTH: Final = 63
CLUSTER_NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$(?!\n)"
"""A DNS-1123 label: no slash, which separates cluster and node in a key, and no dot."""
ClusterName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=MAX_CLUSTER_NAME_LENGTH, pattern=CLUSTER_NAME_PATTERN),
]
DEFAULT_CLUSTER: Final = "default"
"""The cluster name if none is configured."""
# The kernel's boot ids are UUIDs of 36 characters.
BootId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

MAX_VALUE_LENGTH: Final = 64
"""Maximum length of an enumeration's value; even a newer version writes none that is longer."""


class OpenEnum(StrEnum):
    """An extensible enumeration, which also accepts values that it does not define.

    A newer writer may have added such values, so readers pass them on unchanged. The values are
    written to topics: new values may be added, existing values are never renamed.
    """

    @classmethod
    @override
    def _missing_(cls, value: object) -> Self | None:
        # A new object each time, because a writer of records could fill up a cache.
        if not isinstance(value, str) or not 0 < len(value) <= MAX_VALUE_LENGTH:
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A record that is encoded as a JSON object; unknown fields are left out.

    The constructor does not validate. `gpuledger.codec` validates records when it decodes them, and
    before they are written if the writer calls `validate`. The garbage collector does not track
    records: frozen records cannot form cycles, and tracking would cost a pause for every thousand
    records.
    """


class ArrayRecord(BaseRecord, frozen=True, kw_only=True, array_like=True):
    """A record that is encoded as a JSON array, with each field's value at the field's position.

    A sample contains dozens of these records, so field names would take up most of its bytes. An
    unknown value is `null`. New fields are appended; fields are never removed or moved.
    """
