"""The distribution's wheel, built of the checkout as it is: in a second where nothing changed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_hatchling(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Let hatchling build a wheel into the folder, or say why it does not."""
    target = arguments or ("--target", "wheel")
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *target, "--directory", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def build_wheel(folder: Path, *arguments: str, **environment: str) -> Path:
    """Return the wheel; where it cannot be built, the test fails with the builder's words."""
    built = run_hatchling(folder, *arguments, **environment)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
