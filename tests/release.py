"""`make release`: a release's files in one folder, with checksums. Publishes nothing.

The files are the wheel, the Helm chart's archive, and an SBOM per image.
"""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests import sbom
from tests.tools import catalogue

_ROOT: Final = Path(__file__).parents[1]
CHECKSUMS: Final = "SHA256SUMS"


def main(folder: Path) -> None:
    """Write the files into an empty folder; raises CalledProcessError if a builder fails."""
    folder.mkdir(parents=True)
    wheel = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*wheel, "--directory", folder.absolute()], cwd=_ROOT, check=True)
    helm = catalogue.named("helm").provide()
    chart = _ROOT / "k8s" / "chart"
    subprocess.run([helm, "package", chart, "--destination", folder], check=True)
    sbom.main(folder)
    lines = [
        f"{sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(folder.iterdir())
    ]
    (folder / CHECKSUMS).write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
