"""The components as processes, with settings only from their environment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Mapping

BIN = Path(sys.executable).parent
READY_SECONDS = 120.0
END_SECONDS = 120.0


class Component:
    """One running component, with its HTTP endpoints."""

    def __init__(
        self, *, name: str, command: list[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        (port,) = free_ports(1)
        self.name = name
        self.health = f"http://127.0.0.1:{port}"
        settings = {f"GPULEDGER_{key}": value for key, value in environment.items()}
        self._process = Process(
            name=name,
            argv=[BIN / command[0], *command[1:]],
            folder=folder,
            environment={**settings, "GPULEDGER_HTTP__LISTEN": f"127.0.0.1:{port}"},
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self) -> None:
        """Start it."""
        self._process.start()

    def wait_until_ready(self) -> None:
        """Wait until every check of `/readyz` is ok."""
        self._process.wait_until(self._is_ready, deadline_seconds=READY_SECONDS)

    def stop(self) -> int | None:
        """End it by SIGTERM; return the exit status, a negative one if it had to be killed."""
        return self._process.stop(deadline_seconds=END_SECONDS)

    def kill(self) -> int | None:
        """Kill it, like a power cut."""
        return self._process.kill()

    def pause(self) -> None:
        """Suspend it without its noticing."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        self._process.send(signal.SIGCONT)

    def exit_status(self) -> int | None:
        """Return the exit status (negative: the signal), or None while it runs."""
        return self._process.exit_status()

    def metrics(self) -> str:
        """Return the text of `/metrics`."""
        return web.fetch(f"{self.health}/metrics").body.decode()

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self.metrics().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def readyz(self) -> dict[str, Any]:
        """Return the content of `/readyz`."""
        shown: dict[str, Any] = orjson.loads(web.fetch(f"{self.health}/readyz").body)
        return shown

    @property
    def log(self) -> Path:
        """The file with all its output."""
        return self._process.log

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._process.log_tail()

    def _is_ready(self) -> bool:
        answer = web.fetch(f"{self.health}/readyz")
        return answer.status == 200 and bool(orjson.loads(answer.body)["ready"])


def refuse_stray_settings() -> None:
    """Fail if a developer has set a variable that would reach the components under test."""
    stray = sorted(name for name in os.environ if name.startswith("GPULEDGER_"))
    assert not stray, f"unset {', '.join(stray)}: the components would read them as settings"
