"""What is named as a file may be a FIFO that nobody writes to, or a device without an end."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.settings import load_settings
from gpuledger_agent.recording.format import read_recording
from gpuledger_agent.settings import AgentSettings
from gpuledger_cli.demo.plan import find_scenario
from gpuledger_simulator.identities import FileUids
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import choose_epoch_ns
from tests.errors import has_words

READERS: Mapping[str, Callable[[Path], object]] = {
    "a settings file": lambda file: load_settings(
        AgentSettings, prog="p", description="", argv=["--config", str(file)], environ={}
    ),
    "a scenario": load_scenario,
    "the demo's scenario": find_scenario,
    "a recording": read_recording,
    "the UIDs of a simulation": lambda file: FileUids(file, epoch_ns=1).uid("pod"),
    "the epoch of a simulation": lambda file: choose_epoch_ns(0, file=file),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "odd"
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(UserError, check=has_words(str(file))):
        READERS[reader](file)
