"""Which of two versions of a Kubernetes object is the older one. Pure.

What podwatch publishes can come behind what is newer: a leader that was stopped in the middle of a
batch sends the rest of it when it wakes. Whoever reads its records judges them by this alone.
"""

from typing_extensions import TypeVar

from gpuledger.records import NamespaceRecord, NodeRecord, PodRecord

WatchedRecord = PodRecord | NodeRecord | NamespaceRecord
"""What podwatch makes of an object of the API server."""
RecordT = TypeVar("RecordT", bound=WatchedRecord, default=PodRecord)
"""One kind of them; pods, where nothing else is said."""


def is_older(record: WatchedRecord, than: WatchedRecord) -> bool:
    """Return whether a record is older than another of the same UID; never if that is open.

    Kubernetes declares the versions of one resource comparable where they are decimal integers, of
    which the shorter one is the smaller (they may have more digits than a machine's integer).
    """
    version, other = record.resource_version, than.resource_version
    for one in (version, other):
        # Of any other kind Kubernetes says nothing but whether they are equal; and with a zero in
        # front the comparison by length below would not hold.
        if not one.isascii() or not one.isdigit() or one.startswith("0"):
            return False
    return (len(version), version) < (len(other), other)
