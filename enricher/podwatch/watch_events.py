"""What the reflector tells, step by step. Values only."""

from enum import Enum, auto
from typing import NamedTuple

from enricher.podwatch.api import KubernetesError
from gpuledger.records import PodRecord


class Phase(Enum):
    """A step that is about no single pod."""

    LISTING = auto()
    """A complete list begins: what is not seen until `LISTED` is gone."""
    LISTED = auto()
    """The list is complete."""
    WATCHING = auto()
    """A watch is open: the server answers."""


class Upserted(NamedTuple):
    """A pod that is new, changed, or only listed again."""

    pod: PodRecord


class Deleted(NamedTuple):
    """A pod that left the API server, in its last state."""

    pod: PodRecord


class Skipped(NamedTuple):
    """A pod whose newest state cannot be read; what was known of it stays known."""

    uid: str
    """Empty where not even that can be found."""
    version: str
    name: str
    """Its namespace and name, as far as they can be found."""
    error: str
    is_deleted: bool = False
    """Whether it left the API server."""


class Interrupted(NamedTuple):
    """What ended a list or a watch; another attempt follows."""

    error: KubernetesError


Step = Phase | Upserted | Deleted | Skipped | Interrupted
