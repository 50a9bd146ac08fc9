"""The shares that annotations state, and the functions that read their values.

Everybody who may create pods may write annotations, so a value may be anything. A product's
function raises `BadAnnotationError` for a value that it cannot use. Its work per pod is limited,
because it runs in the event loop: use `annotation_of` and `take_shares`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from gpuledger.errors import GpuledgerError
from gpuledger.ledger.division import PPM
from gpuledger.records import AllocationSource
from gpuledger_agent.host.kubelet.pod_list import ListedContainer, ListedPod

MIB: Final = 2**20
GIB: Final = 2**30
MAX_LENGTH: Final = 16 * 1024
"""Maximum number of characters of an annotation: several times that of a pod with 64 shares."""
MAX_SHARES_OF_POD: Final = 64
"""Maximum number of shares that a product's annotations of a pod may state: 16 GPUs for each of 4
containers."""
_WHOLE: Final = re.compile(r"[0-9]{1,15}")
_QUANTITY: Final = re.compile(r"([0-9]{1,18})([KMGT]i|[kMGT])?")
_SUFFIXES: Final[Mapping[str | None, int]] = {
    None: 1,
    **{suffix: 1000 ** (power + 1) for power, suffix in enumerate("kMGT")},
    **{f"{suffix}i": 1024 ** (power + 1) for power, suffix in enumerate("KMGT")},
}
_MAX_FRACTION_LENGTH: Final = 32
_PERCENT: Final = 100

T = TypeVar("T")


class BadAnnotationError(GpuledgerError):
    """An annotation that a product cannot have written; the message has its name, not its value."""


class GpuName(NamedTuple):
    """The GPU of a share, by the name that the product uses."""

    kind: Literal["uuid", "minor", "group"]
    """Whether `name` is a UUID, the number in the device file's name, or a group of pods whose GPU
    a reservation pod has; an empty group means the only reserved GPU of the node."""
    name: str | int
    """The UUID, the number or the group."""


class StatedShare(NamedTuple):
    """A share of one GPU that an annotation gives a container."""

    container: str
    """The container's name in the pod."""
    gpu: GpuName
    """The GPU."""
    share_ppm: int = 0
    """The share in millionths; 0 if only memory is stated."""
    memory_bytes: int = 0
    """The memory; 0 if only the share is stated. The greater of the two shares counts."""


class ShareSource(NamedTuple):
    """A product that writes shares into annotations."""

    source: AllocationSource
    """The product's name in records and settings."""
    resource_name: str
    """The resource name of its allocations if the kubelet reports no devices of the container."""
    has_devices: bool
    """Whether the kubelet also gives these containers devices, whose ids only count shares. Only
    the product that owns their resource may then replace them."""
    find: Callable[[ListedPod], Sequence[StatedShare]]
    """Returns the shares that a pod states; empty if it states none. Raises
    `BadAnnotationError`."""


def annotation_of(pod: ListedPod, annotation: str) -> str:
    """Return an annotation's value, empty if missing; raise `BadAnnotationError` if too long."""
    text = (pod.metadata.annotations or {}).get(annotation, "")
    if len(text) > MAX_LENGTH:
        raise BadAnnotationError(f"{annotation}: over {MAX_LENGTH} characters")
    return text


def take_shares(items: Iterable[T], annotation: str) -> list[T]:
    """Return all items; raise `BadAnnotationError` at the first above `MAX_SHARES_OF_POD`."""
    found = list(islice(items, MAX_SHARES_OF_POD + 1))
    if len(found) > MAX_SHARES_OF_POD:
        raise BadAnnotationError(f"{annotation}: over {MAX_SHARES_OF_POD} shares")
    return found


def containers_of(pod: ListedPod) -> Sequence[ListedContainer]:
    """Return the pod's containers, without init containers."""
    return pod.spec.containers or ()


def container_at(pod: ListedPod, position: int, annotation: str) -> str:
    """Return the name of the container at a position; raise `BadAnnotationError` if missing."""
    containers = containers_of(pod)
    if not 0 <= position < len(containers):
        raise BadAnnotationError(f"{annotation}: the pod has no container {position}")
    return containers[position].name


def read_whole(text: str, annotation: str) -> int:
    """Return a whole number; raise `BadAnnotationError` for other texts."""
    if not _WHOLE.fullmatch(text):
        raise BadAnnotationError(f"{annotation}: expected a whole number")
    return int(text)


def read_quantity(value: str | int, annotation: str) -> int:
    """Return a whole Kubernetes quantity, such as `16Gi`; raise `BadAnnotationError` for others."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise BadAnnotationError(f"{annotation}: expected a quantity such as 16Gi")
    return int(match[1]) * _SUFFIXES[match[2]]


def read_fraction(text: str, annotation: str) -> int:
    """Return a fraction from above 0 to 1 in millionths; raise `BadAnnotationError` for others."""
    try:
        fraction = Decimal(text) if len(text) <= _MAX_FRACTION_LENGTH else Decimal(0)
    except InvalidOperation:
        fraction = Decimal(0)
    # A NaN cannot be compared.
    if not (fraction.is_finite() and 0 < fraction <= 1):
        raise BadAnnotationError(f"{annotation}: expected a fraction above 0 and up to 1")
    return max(1, int((fraction * PPM).to_integral_value(ROUND_HALF_UP)))


def read_json(text: str, kind: type[T], annotation: str) -> T:
    """Return the value of a JSON annotation; raise `BadAnnotationError` if it is not a `kind`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadAnnotationError(f"{annotation}: invalid JSON: {error}") from None


def of_percent(percent: int) -> int:
    """Return a percentage in millionths, at most the whole."""
    return min(percent, _PERCENT) * PPM // _PERCENT


def of_parts(number: int, whole: int) -> int:
    """Return `number` of `whole` parts in millionths, rounded, at least 1 and at most the whole."""
    return min(PPM, max(1, (2 * number * PPM + whole) // (2 * whole)))
