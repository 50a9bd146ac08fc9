"""Scrapes components while they run, as Prometheus does."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from tests.chaos.alerting import RULES
from tests.chaos.scrapes import SCRAPE_SECONDS, Scrapes, Target
from tests.real.services import web

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.real.end_to_end.components import Component

_ANSWER_SECONDS: Final = SCRAPE_SECONDS * 0.75
_OK: Final = 200
NODE: Final = "gpu-node-1"
# By the name of a process: the label of its Service in the manifests.
_LABELS: Final = {"store": "sink-store", "second-agent": "agent"}
COMPONENTS: Final = ("agent", "podwatch", "join", "sink-store", "sink-alerts", "sink-remote-write")
"""Components that the rules expect in each installation."""


async def keep_scraping(components: Mapping[str, Component], scrapes: Scrapes) -> None:
    """Scrape all components that there are at regular times, until cancelled."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        await asyncio.sleep(started + scrapes.count * SCRAPE_SECONDS - loop.time())
        there = dict(components)
        pages = await asyncio.gather(*(asyncio.to_thread(_fetch, each) for each in there.values()))
        scrapes.add(dict(zip(map(target_of, there), pages, strict=True)))


def target_of(name: str) -> Target:
    """Return the labels of a component's process, such as `join-0`."""
    kind = _LABELS.get(name, name.partition("-")[0])
    return Target(instance=name, component=kind, node=NODE if kind == "agent" else "")


def new_scrapes(components: Mapping[str, Component]) -> Scrapes:
    """Return an empty list of scrapes; components that are not part of the run are always up."""
    there = {target_of(name).component for name in components}
    return Scrapes(
        rules=RULES.read_text(),
        started_seconds=int(time.time()),
        others=[name for name in COMPONENTS if name not in there],
    )


def _fetch(component: Component) -> str | None:
    try:
        answer = web.fetch(f"{component.health}/metrics", limit_seconds=_ANSWER_SECONDS)
    except OSError:
        return None
    return answer.body.decode() if answer.status == _OK else None
