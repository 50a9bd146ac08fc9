"""What a scenario says of GPUs that are cut into instances. The shape alone, each field's unit."""

from typing import Annotated

from msgspec import Meta, Struct

Profile = Annotated[str, Meta(pattern=r"^([1-7]c\.)?[1-7]g\.[1-9][0-9]*gb$")]
"""A profile as the driver names it, such as `1g.10gb` or `1c.2g.20gb`."""


class MigLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a GPU is cut from a time on."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """From when on, since the scenario's start; no process may live over a new cut."""
    instances: Annotated[list[Profile | list[Profile]], Meta(max_length=7)]
    """A profile for each instance; a list of profiles cuts one GPU instance into compute instances,
    each of which counts as one."""
