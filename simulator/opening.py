"""Opens a simulation as every process does that takes part in one: scenario, epoch, UIDs.

Nothing else lives here.
"""

from pathlib import Path
from typing import Final

from simulator.epoch import choose_epoch_ns
from simulator.identities import FileUids
from simulator.scenario import load_scenario
from simulator.simulation import Simulation

DEFAULT_SCENARIO: Final = Path(__file__).with_name("default.yaml")
"""A scenario of one node, for who has none of his own."""


def open_simulation(
    scenario: Path,
    *,
    epoch_ns: int = 0,
    epoch_file: Path | None = None,
    uids_file: Path | None = None,
) -> Simulation:
    """Read a scenario and start or join its run; raises UserError.

    The epoch is `epoch_ns`, else what `epoch_file` holds, else now. With `uids_file` the pods have
    the UIDs that a driven API server gave them.
    """
    read = load_scenario(scenario)
    epoch_ns = choose_epoch_ns(epoch_ns, file=epoch_file)
    uids = FileUids(uids_file, epoch_ns=epoch_ns) if uids_file else None
    return Simulation(read, epoch_ns=epoch_ns, uids=uids)
