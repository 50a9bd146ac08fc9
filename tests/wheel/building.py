"""Builds the wheel from the checkout; takes a second if nothing has changed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_hatchling(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Build a wheel into the directory with hatchling; its output explains a failure."""
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
    """Return the wheel; if the build fails, the test fails with the builder's output."""
    built = run_hatchling(folder, *arguments, **environment)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel
