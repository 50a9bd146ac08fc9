"""The version that programs print is the one that is built."""

import tomllib
from pathlib import Path

from gpuledger import __version__

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_version_in_the_code_is_that_of_the_distribution() -> None:
    assert __version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]
