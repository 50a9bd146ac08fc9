"""Replaces what names a machine, a program or a pod by a pseudonym, the same one for the same name.

Models, versions and every number that is measured stay as they are.
"""

import re
from collections.abc import Callable
from typing import Final

import msgspec

from agent.recording.format import RecordingLine, write_line

_UUID: Final = re.compile(rb"[0-9a-f]{8}([-_])(?:[0-9a-f]{4}\1){3}[0-9a-f]{12}", re.IGNORECASE)
_CONTAINER: Final = re.compile(rb"\b[0-9a-f]{64}\b")
_BUS_ID: Final = re.compile(rb"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\b")
_BUS_NUMBERS: Final = re.compile(rb'"(domain|bus|device)":\d+')
_CLUSTER: Final = re.compile(rb'"clusterUuid":(?:\{[^}]*\}|"[^"]*")')
_COMMAND: Final = re.compile(r"\(.*\)", re.DOTALL)
_SECRET_CALLS: Final = frozenset(
    {"nvmlDeviceGetSerial", "nvmlSystemGetProcessName", "nvmlDeviceGetBoardPartNumber"}
)
_PROGRAM_FILES: Final = ("/comm", "/cmdline", "/environ")
_NOBODY: Final = b'"clusterUuid":{"array":[' + b",".join([b"0"] * 16) + b"]}"


class Redactor:
    """Writes lines without identities."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], int] = {}

    def write(self, line: RecordingLine) -> bytes:
        """Return a line as it stands in the file."""
        text = write_line(self._without_names(line))
        text = _UUID.sub(self._replace("uuid", self._uuid), text)
        text = _CONTAINER.sub(self._replace("container", _hexadecimal), text)
        text = _BUS_ID.sub(self._replace("bus", _bus_id), text)
        if b"busId" in text:
            text = _BUS_NUMBERS.sub(rb'"\1":0', text)
        return _CLUSTER.sub(_NOBODY, text)

    def _without_names(self, line: RecordingLine) -> RecordingLine:
        if not isinstance(line.result, str):
            return line
        result = line.result
        if line.call in _SECRET_CALLS:
            result = f"name-{self._number(line.call or '', result.encode())}"
        elif line.read and line.read.endswith("/stat"):
            result = _COMMAND.sub(self._command, result)
        elif line.read and line.read.endswith(_PROGRAM_FILES):
            result = f"program-{self._number('program', result.strip().encode())}\n"
        return msgspec.structs.replace(line, result=result)

    def _command(self, found: "re.Match[str]") -> str:
        return f"(program-{self._number('program', found[0][1:-1].encode())})"

    def _replace(
        self, kind: str, name: Callable[[int, bytes], bytes]
    ) -> "Callable[[re.Match[bytes]], bytes]":
        return lambda found: name(self._number(kind, _plain(found[0])), found[0])

    def _number(self, kind: str, identity: bytes) -> int:
        return self._known.setdefault((kind, identity), len(self._known) + 1)

    def _uuid(self, number: int, found: bytes) -> bytes:
        return f"00000000-0000-4000-8000-{number:012d}".encode().replace(b"-", found[8:9])


def _plain(identity: bytes) -> bytes:
    """Return one spelling of an identity, as cgroups and the driver write it differently."""
    return identity.lower().replace(b"_", b"-")


def _hexadecimal(number: int, _found: bytes) -> bytes:
    return f"{number:064x}".encode()


def _bus_id(number: int, found: bytes) -> bytes:
    domain = len(found.partition(b":")[0])
    return f"{0:0{domain}x}:{number % 256:02x}:00.0".encode()
