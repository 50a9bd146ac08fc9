"""Builds the stub: generates its functions from the list, compiles it with the local compiler."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

from benchmarks.nvml_stub.functions import FIELD_VALUES, GPM_METRICS, as_header
from gpuledger.errors import UnavailableError

LIBRARY: Final = "libnvidia-ml.so.1"
_SOURCE: Final = Path(__file__).with_name("stub.c")
_COMPILERS: Final = ("cc", "gcc", "clang")


def build_stub(folder: Path) -> Path:
    """Compile `libnvidia-ml.so.1` into a folder; raises UnavailableError without a compiler."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(
            "no C compiler (cc, gcc or clang) for the library that plays NVML: install gcc"
        )
    (folder / "functions.inc").write_text(as_header())
    made = folder / LIBRARY
    command = [compiler, "-O2", "-Wall", "-shared", "-fPIC", f"-I{folder}"]
    command += [f"-DFIELD_VALUES={FIELD_VALUES}", f"-DGPM_METRICS={GPM_METRICS}"]
    ended = subprocess.run(  # noqa: S603  # the machine's own compiler
        [*command, "-o", made, _SOURCE], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise UnavailableError(f"{compiler} cannot compile {_SOURCE.name}: {ended.stderr.strip()}")
    return made
