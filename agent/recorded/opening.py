"""Opens a recording, as the machine that it is of. Nothing else lives here."""

from pathlib import Path

from agent.recorded.player import PlayedClock, PlayedLibrary, PlayedProcfs
from agent.recorded.tape import read_tape
from gpuledger.clock import SystemClock


def open_recording(file: Path) -> tuple[PlayedClock, PlayedLibrary, PlayedProcfs]:
    """Read a recording and begin to play it; raises UserError."""
    header, lines = read_tape(file)
    clock = PlayedClock(header, SystemClock())
    return clock, PlayedLibrary(header, lines, clock), PlayedProcfs(header, lines, clock)
