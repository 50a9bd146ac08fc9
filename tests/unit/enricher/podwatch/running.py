"""Runs podwatch as a whole and reads what it published."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus, Record
from gpuledger.clock import Clock
from gpuledger.codec import decoder_of
from gpuledger.keys import split_key
from gpuledger.records import PodRecord
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_enricher.podwatch.pod_watch import run_podwatch
from tests.default_topics import PODS
from tests.unit.enricher.podwatch.builders import (
    PatientClock,
)


class StillClock(PatientClock):
    """A clock whose sleeps never end."""

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def running(
    *, bus: Bus, settings: PodwatchSettings, readiness: Readiness, clock: Clock
) -> AsyncGenerator[None]:
    """Run podwatch while the context is open; raise its failure from the context."""
    async with open_api(settings.kubernetes) as api:
        task = asyncio.create_task(
            run_podwatch(api=api, bus=bus, settings=settings, readiness=readiness, clock=clock)
        )
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def decoded(record: Record) -> PodRecord:
    found: PodRecord = decoder_of(PODS.name, PodRecord).decode(record.value)
    return found


async def topic(bus: MemoryBus) -> list[Record]:
    """Return everything published so far, each partition in order."""
    async with bus.reader() as reader:
        spans = await reader.spans(PODS.name)
        return [
            record
            for place, span in spans.items()
            async for records in reader.read(place, span)
            for record in records
        ]


def states(records: list[Record]) -> dict[str, list[str]]:
    """Return the published states of each pod."""
    found: dict[str, list[str]] = {}
    for record in records:
        key = (record.key or b"").decode()
        found.setdefault(split_key(key)[1], []).append(_state(record))
    return found


def _state(record: Record) -> str:
    if record.value is None:
        return "tombstone"
    pod = decoded(record)
    return pod.phase if pod.deleted_time_ns is None else "deleted"
