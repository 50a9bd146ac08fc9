"""What a scenario says of a driver that fails. The shape alone, each field with its unit."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Kind = Literal[
    "lost", "reset_required", "hang", "garbage", "not_supported", "growing_list",
    "driver_reload", "version_mismatch", "unbind",
]  # fmt: skip


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a node's driver does wrong for a while."""

    node: str
    """The node's name."""
    kind: Kind
    """`lost` and `reset_required`: the GPUs answer with that error, and handles that were taken
    before the end do so after it. `hang`: calls do not return. `garbage`: values that cannot be
    true. `not_supported`: calls that the driver does not know any more. `growing_list`: lists that
    grew between the two calls that it takes to read them. `driver_reload`: there is no driver, and
    afterwards all counters begin anew and no handle is good. `version_mismatch`: the library is
    not the driver's. `unbind`: the driver tells that it will be unbound, and is so as soon as
    nobody holds the library open; then as `driver_reload`."""
    gpus: list[Annotated[int, Meta(ge=0)]] = []
    """The driver's indices of the GPUs; all of them where there is none."""
    calls: list[Annotated[str, Meta(pattern="^nvml")]] = []
    """NVML's names of the functions; where there is none, all that take a GPU, and of `garbage`
    those that give a plain reading."""
    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """When it begins, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """When it ends, since the scenario's start; absent: never."""
    failures: Annotated[int, Meta(ge=1)] = 1
    """Of `growing_list`: how often a call fails before it succeeds once."""
