"""Scenarios played through the real components in one process, up to their bill."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from gpuledger.bus.memory import MemoryBus
from gpuledger.store.commits import mark_complete
from gpuledger.store.schema import table_uri
from gpuledger.store.usage_schema import USAGE
from gpuledger_cli.demo.pipeline import drain, running
from gpuledger_cli.demo.plan import DemoPlan
from gpuledger_cli.demo.source import SimulatedMachine
from gpuledger_reports.presenting.output import as_json
from gpuledger_reports.pricing.billing import BillMaker
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.hanging import HANG_SECONDS

DAY_US = 86_400_000_000
PRICES = "prices: [{name: any, model: '*', per_gpu_hour: 3600}]\n"
"""One unit of currency per second."""

Lines = Mapping[str, Mapping[str, Any]]
"""The line items of a bill as JSON, by the name of the pod."""


def lines_of(scenario: Mapping[str, Any], folder: Path, *, ticks_of_a_node: int = 2) -> Lines:
    """Return a scenario's bill by namespace and pod after this many samples of each node."""
    file = folder / "scenario.yaml"
    file.write_text(json.dumps(scenario))
    asyncio.run(_play(file, folder / "store", ticks=ticks_of_a_node * len(scenario["nodes"])))
    today_us = time.time_ns() // 1000 // DAY_US * DAY_US
    # The run is over, so its last minute is complete too.
    mark_complete(DeltaTable(table_uri(str(folder / "store"), USAGE.name)), today_us + DAY_US)
    read = ReadPolicy(parse_policy(PRICES), "0" * 64, "test")
    store = UsageReader(str(folder / "store"), distinguishes_gpus=False)
    window = Window(today_us - DAY_US, today_us + 2 * DAY_US)
    bill = BillMaker(store, read, by=("namespace", "pod")).make(window)
    return {line["pod"]: line for line in json.loads(as_json(bill))["lines"]}


async def _play(scenario: Path, store: Path, *, ticks: int) -> None:
    plan = DemoPlan(scenario=scenario, source="simulated", kafka=None, store=store, seconds=None)
    machine = SimulatedMachine(scenario, cluster=plan.cluster)
    async with running(plan, bus=MemoryBus(), machine=machine) as run:
        async with asyncio.timeout(HANG_SECONDS):
            while run.tally.events < ticks:  # noqa: ASYNC110  # the tally has no event for this
                await asyncio.sleep(0.01)
        await drain(run)
