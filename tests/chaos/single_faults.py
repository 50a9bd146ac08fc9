"""Runs faults one after another, and compares each with the table."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UnavailableError
from tests.chaos.alerting import find_fired
from tests.chaos.beside import beside
from tests.chaos.installation import Installation
from tests.chaos.scrapes import LAST_SCRAPES, SCRAPE_SECONDS, Scrapes
from tests.chaos.scraping import keep_scraping, new_scrapes
from tests.real.services.process import PartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.chaos.faults import Fault
    from tests.chaos.installation import FaultCluster
    from tests.chaos.stored_time import StoredTime

_CALM_SECONDS: Final = 8.0
_RECOVERY_SECONDS: Final = 90.0
_FRESH_NS: Final = 2 * NS_PER_SECOND
# A gap of a second is more than a hundredth of a run that takes one minute.
_OF_ANY_GAP: Final = frozenset({"GpuledgerGapsSeen"})


@dataclass(frozen=True, kw_only=True)
class Found:
    """The observed effects of a fault."""

    stored: StoredTime | None
    has_recovered: bool
    lasting: Mapping[str, Sequence[str]]
    """The alerts that fire if the fault lasts, with the components that they name."""
    repaired: Mapping[str, Sequence[str]]
    """The alerts that fire although the fault was repaired."""

    def as_line(self) -> str:
        """Return the result in words."""
        stored = self.stored.as_line() if self.stored else "nothing is stored"
        return f"{stored}; alerts: {_named(self.lasting)}; if repaired: {_named(self.repaired)}"

    def problems(self, fault: Fault) -> list[str]:
        """Return how it differs from the table; nothing if all is as required."""
        may_fire = _OF_ANY_GAP if fault.may_lose_seconds else frozenset()
        lasting, repaired = set(self.lasting) - may_fire, set(self.repaired) - may_fire
        stored = self.stored
        named = stored.named_seconds if stored else 0.0
        unknown = stored.unknown_seconds if stored else 0.0
        found = {
            "time is lost": stored is None or stored.lost_seconds > 0,
            "time is stored twice": stored is not None and stored.repeated_seconds > 0,
            "time is missing": named > fault.may_lose_seconds and not fault.loses,
            "no gap is named": not named and fault.loses,
            "allocations are not unknown": unknown < fault.unknown_seconds,
            "it is not repaired": not self.has_recovered,
            f"does not fire: {_listed(fault.alerts - lasting)}": not fault.alerts <= lasting,
            f"fires: {_listed(lasting - fault.alerts - fault.consequences)}": (
                not lasting <= fault.alerts | fault.consequences
            ),
            f"does not fire at once: {_listed(fault.at_once - repaired)}": (
                not fault.at_once <= repaired
            ),
            f"fires although repaired: {_listed(repaired - fault.at_once)}": (
                not repaired <= fault.at_once
            ),
        }
        return [text for text, is_so in found.items() if is_so]


def _listed(alerts: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(alerts))


def _named(alerts: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(of)})" for name, of in sorted(alerts.items())) or "none"


class SingleFaults:
    """Runs faults on one cluster."""

    def __init__(
        self,
        cluster: FaultCluster,
        *,
        promtool: Path,
        folder: Path,
        print_line: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._promtool = promtool
        self._folder = folder
        self._print = print_line

    async def run(self, faults: Sequence[Fault]) -> list[str]:
        """Run the faults; return the names of those that differ from the table."""
        try:
            await asyncio.to_thread(self._cluster.start)
            return [fault.name for fault in faults if not await self._keeps(fault)]
        finally:
            self._cluster.discard()

    async def _keeps(self, fault: Fault) -> bool:
        started = time.monotonic()
        self._print(f"{fault.name} ...")
        try:
            found = await self._find(fault)
        except UnavailableError as error:
            self._print(f"!!! {fault.name}: not run: {error}")
            return True
        except (PartError, ExceptionGroup) as error:
            self._print(f"!!! {fault.name}: {error!r}")
            return False
        self._print(f"  {found.as_line()}")
        problems = found.problems(fault)
        if not problems:
            self._print(f"{fault.name}: as required, {time.monotonic() - started:.0f} s")
            return True
        for problem in problems:
            self._print(f"!!! {fault.name}: {problem}")
        return False

    async def _find(self, fault: Fault) -> Found:
        folder = self._folder / fault.name
        folder.mkdir()
        installation = Installation(
            self._cluster, folder=folder, small_disk=fault.small_disk, print_line=self._print
        )
        try:
            await installation.start()
            return await self._disturb(fault, installation)
        finally:
            installation.discard()

    async def _disturb(self, fault: Fault, installation: Installation) -> Found:
        scrapes = new_scrapes(installation.components)
        scraping = keep_scraping(installation.components, scrapes)
        async with beside(scraping, installation.keep_up()):
            await asyncio.sleep(_CALM_SECONDS)
            await fault.inject(installation)
            await asyncio.sleep(fault.seconds)
            lasted = scrapes.count
            has_recovered = await self._repair(fault, installation)
            await asyncio.sleep(LAST_SCRAPES * SCRAPE_SECONDS)
        await installation.end()
        return Found(
            stored=installation.read_store(),
            has_recovered=has_recovered,
            lasting=self._fired(scrapes, lasted, installation),
            repaired=self._fired(scrapes, scrapes.count, installation),
        )

    async def _repair(self, fault: Fault, installation: Installation) -> bool:
        """Repair a fault; return whether all components work again in time."""
        try:
            await fault.repair(installation)
        except TimeoutError:
            return False
        fresh_ns = time.time_ns() + _FRESH_NS
        return await installation.await_stored(
            fresh_ns, seconds=_RECOVERY_SECONDS
        ) and await installation.await_ready(seconds=_RECOVERY_SECONDS)

    def _fired(
        self, scrapes: Scrapes, first: int, installation: Installation
    ) -> Mapping[str, Sequence[str]]:
        return find_fired(scrapes, first=first, promtool=self._promtool, folder=installation.folder)
