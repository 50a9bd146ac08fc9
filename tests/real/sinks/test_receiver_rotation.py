"""The receiver's password and authority are replaced while the sink runs, on a real Prometheus."""

from __future__ import annotations

import asyncio
import shutil
import time
from itertools import count
from typing import TYPE_CHECKING

from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.settings import Secret
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.services.certificates import Authority
from tests.real.services.prometheus import SecuredPrometheus
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import bus, event, eventually, publish

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.services.starter import Starter

READING = "gpuledger_gpu_memory_total_bytes"
WITHIN_SECONDS = 120


class Mounted:
    """The files that the sink reads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca_file, self.password = folder / "ca.crt", folder / "password"

    def write(self, authority: Authority, *, password: str) -> None:
        shutil.copy(authority.certificate, self.ca_file)
        self.password.write_text(f"{password}\n")

    def settings(self, receiver: SecuredPrometheus) -> RemoteWriteSettings:
        return RemoteWriteSettings(
            url=receiver.remote_write_url,
            interval_seconds=0,
            username=receiver.username,
            password=Secret.load(self.password, name="remote_write.password"),
            ca_file=str(self.ca_file),
        )


async def test_samples_are_still_accepted_while_password_and_authority_are_replaced(
    prometheus_binary: Path, starter: Starter, tmp_path: Path
) -> None:
    first, second = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    mounted, readiness, on = Mounted(tmp_path / "mounted"), Readiness(), bus()
    mounted.write(first, password="first")
    receiver = starter.start(
        SecuredPrometheus(
            binary=prometheus_binary,
            folder=starter.new_folder("prometheus"),
            authority=first,
            password="first",
        )
    )
    credentials, answered = (
        readiness.check(f"remote_write.{name}", severity=CheckSeverity.WARNING)
        for name in ("credentials", "receiver")
    )

    async def takes(node: str) -> None:
        """Send a tick of a node, and find it."""
        await publish(on, event(node=node, time_ns=time.time_ns()))
        await asyncio.to_thread(
            lambda: receiver.await_query(
                f'{READING}{{node="{node}"}}', deadline_seconds=WITHIN_SECONDS
            )
        )

    async with sending(on, mounted.settings(receiver), readiness=readiness):
        await takes("first")

        mounted.ca_file.write_text("damaged")
        async with asyncio.timeout(WITHIN_SECONDS):
            for number in count():
                await takes(f"while-damaged-{number}")
                if credentials.has_failed:
                    break
        assert "remote_write.ca_file" in credentials.detail

        receiver.exchange(second, password="second")
        await publish(on, event(node="refused", time_ns=time.time_ns()))
        await eventually(lambda: answered.has_failed, within_seconds=WITHIN_SECONDS)
        mounted.write(second, password="second")
        await takes("second")
        assert credentials.is_ok
        assert answered.is_ok
