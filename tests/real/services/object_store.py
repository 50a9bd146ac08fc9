"""Versity's S3 gateway over a folder: an S3 server with one bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Part

if TYPE_CHECKING:
    from pathlib import Path

BUCKET = "ledger"
ACCESS_KEY = "gateway-key-id"
SECRET_KEY = "gateway-secret-that-nobody-may-see"  # only of this server


class ObjectStore(Part):
    """A gateway that the tests own; its objects are deleted with it."""

    name = "versitygw"

    def __init__(self, *, binary: Path, folder: Path) -> None:
        super().__init__(folder=folder)
        self._binary = binary
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        self.url = f"http://{self._address}"
        for name in (f"objects/{BUCKET}", "attributes"):
            (folder / "data" / name).mkdir(parents=True)

    @property
    def options(self) -> dict[str, str]:
        """Options of the storage, for deltalake and the sink."""
        return {
            "aws_endpoint_url": self.url,
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }

    @override
    def argv(self) -> list[str | Path]:
        data = self.folder / "data"
        return [
            self._binary,
            *("--access", ACCESS_KEY, "--secret", SECRET_KEY),
            *("--port", self._address, "--health", "/health"),
            # In a separate folder, because not every file system supports file attributes.
            *("posix", "--sidecar", data / "attributes", data / "objects"),
        ]

    @override
    def is_ready(self) -> bool:
        return web.fetch(f"{self.url}/health").status == 200

    def count(self, method: str, path: str = "") -> int:
        """Return how many requests with this method, and this in their paths, were answered."""
        lines = self.log.read_text().splitlines()
        return sum(f"| {method} | " in line and path in line for line in lines)
