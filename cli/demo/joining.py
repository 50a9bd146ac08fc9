"""Waits at the start of a run until its consumer groups are its own, before there is a tick."""

import asyncio
from collections.abc import Sequence
from typing import Final

from cli.demo.run_bus import Offsets, RunBus
from cli.demo.source import DemoBus
from cli.demo.stage_tasks import Stages
from gpuledger.errors import BusUnavailableError
from gpuledger.runtime.tasks import end_tasks
from gpuledger.topics import SAMPLES

_JOINING_SECONDS: Final = 30.0
"""How long the groups may take to give all partitions to this run. Members of a run that ended
without a word hold theirs for a session, which is `cli.demo.plan`'s."""
_ASKING_SECONDS: Final = 1.0


async def hold_all(bus: DemoBus, stages: Stages, views: Sequence[RunBus]) -> None:
    """Wait until each group has given all partitions to this run.

    Raises `BusError` where the brokers fall silent, or the groups have other members; and what a
    stage has raised.
    """
    asking = asyncio.create_task(_ask_until_silent(bus))
    try:
        async with asyncio.timeout(_JOINING_SECONDS):
            while not all(view.holds_all() for view in views):
                stages.must_run()
                if asking.done():
                    await asking
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise BusUnavailableError(
            f"the brokers have not given all partitions to this demo's consumer groups ({PREFIX}…)"
            f" within {_JOINING_SECONDS:g} s: another demo reads these topics, and each would count"
            " the other's ticks; end it, or name other brokers"
        ) from error
    finally:
        await end_tasks(asking)


def refuse_changes(beginning: Offsets, now: Offsets) -> None:
    """Raise `BusError` where a tick was written since the beginning: none of this run is.

    Another demo that began at the same time would else have its ticks booked by this one. In other
    topics transactions may end meanwhile that a run left open that was killed.
    """
    if any(now[at] != beginning.get(at) for at in now if at.topic == SAMPLES.name):
        raise BusUnavailableError(
            f"somebody has written to {SAMPLES.name} while this demo's consumer groups ({PREFIX}…)"
            " formed: another demo reads these topics, and each would count the other's ticks; end"
            " it, or name other brokers"
        )


async def _ask_until_silent(bus: DemoBus) -> None:
    """Raise `BusError` once the brokers do not answer: stages wait for them, without an end."""
    while True:
        await bus.partitions(SAMPLES.name)
        await asyncio.sleep(_ASKING_SECONDS)


# The consumer groups of the demo are its own: no deployment loses a partition to it.
#
# The names of the join's transactions begin with its group, and so are the demo's own too.

PREFIX: Final = "gpuledger-demo-"
_OF_A_DEPLOYMENT: Final = "gpuledger-"


def own_group(group: str) -> str:
    """Return the name of the demo's group that does the work of a deployment's group."""
    return PREFIX + group.removeprefix(_OF_A_DEPLOYMENT)


def is_own(group: str) -> bool:
    """Return whether a group is a demo's."""
    return group.startswith(PREFIX)
