"""An image with only busybox, as a file that a container runtime imports without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAME = "docker.io/local/busybox:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(path: Path, *, busybox: Path) -> None:
    """Write an archive as `docker save` does; the image runs until it is killed."""
    layer = _tar({"bin/busybox": busybox.read_bytes()}, links={"bin/sh": "busybox"})
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "sleep", "1000000"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    path.write_bytes(_tar(files))


def _tar(files: dict[str, bytes], *, links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()
