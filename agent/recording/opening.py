"""Opens a recording, as the machine that it is of. Nothing else lives here."""

from pathlib import Path

from agent.recording.format import read_tape
from agent.recording.replay import ReplayClock, ReplayLibrary, ReplayProcfs
from gpuledger.clock import SystemClock


def open_recording(file: Path) -> tuple[ReplayClock, ReplayLibrary, ReplayProcfs]:
    """Read a recording and begin to play it; raises UserError."""
    header, lines = read_tape(file)
    clock = ReplayClock(header, SystemClock())
    return clock, ReplayLibrary(header, lines, clock), ReplayProcfs(header, lines, clock)
