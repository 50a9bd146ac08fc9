"""A reflector whose pauses take no time, and its steps as words."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from gpuledger_enricher.podwatch.api import Api
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import Deleted, Interrupted, Skipped, Step, Upserted
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_enricher.podwatch.reflector import Reflector
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import PatientClock, reader_of
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer


def reflector_of(
    api: Api, settings: KubernetesSettings, clock: PatientClock, *, chance: float = 0.0
) -> Reflector:
    """Return a reflector with a fixed random value."""
    return Reflector(
        kind=POD, api=api, reader=reader_of(), settings=settings, clock=clock, chance=lambda: chance
    )


async def steps_until(reflector: Reflector, enough: Callable[[list[Step]], bool]) -> list[Step]:
    """Take steps until the condition holds."""
    taken: list[Step] = []
    async with asyncio.timeout(HANG_SECONDS), aclosing(reflector.run()) as steps:
        async for step in steps:
            taken.append(step)
            if enough(taken):
                return taken
    raise AssertionError("the reflector ended")


async def follow(
    server: MisbehavingServer,
    clock: PatientClock,
    enough: Callable[[list[Step]], bool],
    *,
    chance: float = 0.0,
    **settings: object,
) -> list[Step]:
    """Take the steps of a reflector with that server and those settings."""
    chosen = KubernetesSettings(url=server.url, **settings)  # type: ignore[arg-type]  # any setting
    async with open_api(chosen) as api:
        return await steps_until(reflector_of(api, chosen, clock, chance=chance), enough)


def last(word: str) -> Callable[[list[Step]], bool]:
    """Return the condition that the last step is this word."""
    return lambda taken: as_word(taken[-1]) == word


def reported(steps: list[Step]) -> list[str]:
    """Write steps as words, for comparison."""
    return [as_word(step) for step in steps]


def as_word(step: Step) -> str:
    """Write a step as a word: `+` seen, `-` deleted, `?` skipped, `!` interrupted."""
    match step:
        case Upserted(found):
            return f"+{found.uid}"
        case Deleted(found):
            return f"-{found.uid}"
        case Skipped(uid=uid):
            return f"?{uid}"
        case Interrupted(failure):
            return f"!{failure.status}"
        case _:
            return step.name


def nth(step: Step, count: int) -> Callable[[list[Step]], bool]:
    """Return the condition that a step was taken this many times."""
    return lambda taken: taken.count(step) == count
