"""Kubernetes' own implementation of the kubelet's pod-resources API, in Go; answers from a file."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.real.services.process import Part

if TYPE_CHECKING:
    from collections.abc import Sequence


class KubeletServer(Part):
    """A server on a Unix socket; a test writes its answers."""

    name = "kubelet"
    ready_seconds = 120.0

    def __init__(self, *, binary: Path, folder: Path) -> None:
        super().__init__(folder=folder)
        self.binary = binary
        # A socket's path may have 107 bytes, and pytest's folders are deep.
        self._short = tempfile.TemporaryDirectory(prefix="kubelet-")
        self.socket = Path(self._short.name) / "kubelet.sock"
        self.file = Path(self._short.name) / "answer.json"
        self.answer([])

    @override
    def argv(self) -> list[str | Path]:
        return [self.binary, self.socket, self.file]

    @override
    def is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
        return True

    @override
    def discard(self) -> None:
        super().discard()
        self._short.cleanup()

    def answer(self, pods: Sequence[dict[str, Any]]) -> None:
        """Answer the next requests with these `PodResources`, given as in JSON."""
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps({"podResources": list(pods)}))
        draft.replace(self.file)

    def delay(self, duration: str) -> None:
        """Delay answers by a duration, such as `3s`."""
        self.file.with_name(f"{self.file.name}.delay").write_text(duration)

    def refuse(self, code: str, message: str) -> None:
        """Answer all requests with one of gRPC's codes, such as `UNIMPLEMENTED`, and a message."""
        self.file.with_name(f"{self.file.name}.refuse").write_text(f"{code} {message}")

    def resume(self) -> None:
        """Answer again, without a delay."""
        for kind in ("delay", "refuse"):
            self.file.with_name(f"{self.file.name}.{kind}").unlink(missing_ok=True)
