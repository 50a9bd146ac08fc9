"""MIG profiles of NVIDIA's products."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

_GIB: Final = 1 << 30


class MigSlices(NamedTuple):
    """The slices of a GPU instance or of a whole GPU."""

    compute: int
    """Number of compute slices."""
    memory: int
    """Number of memory slices."""


# The profiles of each GPU have these slices, in this order; the last profile is the whole GPU.
_SEVENTHS: Final = (
    MigSlices(1, 1),
    MigSlices(1, 2),
    MigSlices(2, 2),
    MigSlices(3, 4),
    MigSlices(4, 4),
    MigSlices(7, 8),
)
_FOURTHS: Final = (MigSlices(1, 1), MigSlices(2, 2), MigSlices(4, 4))


@dataclass(frozen=True, kw_only=True)
class MigGpu:
    """The MIG profiles of a product."""

    product: str
    """A word of the product name."""
    gigabytes: int
    """Memory size, which distinguishes products of the same name."""
    profiles: Mapping[str, MigSlices]
    """Slices of a GPU instance of each profile; profiles with media extensions are left
    out."""

    @property
    def whole(self) -> MigSlices:
        """Slices of the whole GPU."""
        return max(self.profiles.values())


def _mig_gpu(product: str, gigabytes: int, names: str) -> MigGpu:
    shapes = _FOURTHS if names.count(" ") + 1 == len(_FOURTHS) else _SEVENTHS
    profiles = dict(zip(names.split(), shapes, strict=True))
    return MigGpu(product=product, gigabytes=gigabytes, profiles=profiles)


MIG_GPUS: Final = (
    _mig_gpu("A30", 24, "1g.6gb 2g.12gb 4g.24gb"),
    _mig_gpu("A100", 40, "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
    _mig_gpu("A100", 80, "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
    _mig_gpu("H100", 80, "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
    _mig_gpu("H100", 94, "1g.12gb 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"),
    _mig_gpu("H100", 96, "1g.12gb 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"),
    _mig_gpu("GH200", 96, "1g.12gb 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"),
    _mig_gpu("H200", 141, "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
    _mig_gpu("B200", 180, "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
)
"""The GPUs that support MIG, from the chapter "Supported MIG Profiles" of NVIDIA's "Multi-Instance
GPU User Guide". If a GPU has two profiles with one compute slice, the larger one has two memory
slices: `nvidia-smi mig -lgipp` lists four placements for this profile, each two slices wide."""


def mig_gpu_of(name: str, *, memory_bytes: int) -> MigGpu | None:
    """Return the MIG profiles of a product; `None` if the product does not support MIG."""
    words = re.split(r"[\s-]+", name)
    mig_gpus = [mig_gpu for mig_gpu in MIG_GPUS if mig_gpu.product in words]
    return min(
        mig_gpus, key=lambda mig_gpu: abs(mig_gpu.gigabytes * _GIB - memory_bytes), default=None
    )
