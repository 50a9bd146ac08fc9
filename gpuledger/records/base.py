"""What all records are: frozen, keyword-only, and without a key for what is not known.

Here live the base classes of all records and of enumerations that grow, their whole numbers, and
the bounds of what identifies a tick: cluster, node, boot and `seq`. Decoding holds every record to
them. No record itself, no encoding.

`frozen` and `kw_only` are named at each record again: msgspec hands down the one but not the other,
and type checkers neither.
"""

from enum import StrEnum
from typing import Annotated, Final, Self

import msgspec
from typing_extensions import override

# What does not fit in 64 bits decodes, but could never be encoded again; and a position of -1
# would be the last one in Python.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# What the store keeps in 32 bits.
SmallNatural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MAX_SEQ: Final = 10 * 366 * 86_400_000
"""Ten years in milliseconds: longer than any kernel runs."""
# What of a boot is not above the highest `seq` of it counts as repeated, so one that cannot be
# true would cost all ticks of that boot.
Seq = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
MAX_NODE_NAME_LENGTH: Final = 253
# `$` alone would take a newline behind it, in Python though not in JSON Schema.
NODE_NAME_PATTERN: Final = (
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$(?!\n)"
)
"""Kubernetes' rule for the names of nodes: a DNS-1123 subdomain."""
NodeName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=MAX_NODE_NAME_LENGTH, pattern=NODE_NAME_PATTERN),
]
MAX_CLUSTER_NAME_LENGTH: Final = 63
CLUSTER_NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$(?!\n)"
"""A DNS-1123 label: no slash, which ends it in a key, and no dot."""
ClusterName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=MAX_CLUSTER_NAME_LENGTH, pattern=CLUSTER_NAME_PATTERN),
]
DEFAULT_CLUSTER: Final = "default"
"""The cluster of an installation that was told none."""
# The kernel's are UUIDs, of 36 characters.
BootId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]

MAX_VALUE_LENGTH: Final = 64
"""Of a value of an enumeration: longer ones are no newer version's."""


class OpenEnum(StrEnum):
    """An enumeration that grows: readers pass on a value that a newer writer has added to it.

    Values are written: one is added, none is ever renamed.
    """

    @classmethod
    @override
    def _missing_(cls, value: object) -> Self | None:
        # Of its own each time, as what is kept could be filled up by anybody.
        if not isinstance(value, str) or not 0 < len(value) <= MAX_VALUE_LENGTH:
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A record that is written as an object: no key for what is not known.

    Constructing one validates nothing: `gpuledger.codec` validates what is decoded, and what is
    written where its writer asks for it. The garbage collector never visits a record, which would
    cost a pause for each thousand of them: no record can hold one that holds it, as all are frozen.
    """


class ArrayRecord(BaseRecord, frozen=True, kw_only=True, array_like=True):
    """A record that is written as an array: each field's value at its position.

    For what comes in tens in each tick, where names would be most of the bytes. What is not known
    is `null`. A new field is put behind the last one; none is ever taken out or moved.
    """
