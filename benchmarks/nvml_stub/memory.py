"""The memory that the stub and its player share: questions from one side, answers from the other.

The layout is `struct shared` of `stub.c`. Only the player writes answers.
"""

import ctypes
import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

_WANTED: Final = 1024
_SLOTS: Final = 8192
_ARENA_BYTES: Final = 4 * 1024 * 1024
_MIN_ROOM: Final = 16
_HEAD: Final = struct.Struct("<II")
_QUESTION: Final = struct.Struct("<IIII")
_MASK: Final = 0xFFFFFFFF


class Question(NamedTuple):
    """One query of the agent."""

    function: int
    device: int
    first: int
    second: int


class _Slot(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("second", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("offset", ctypes.c_uint32),
        ("length", ctypes.c_uint32),
    )


_SLOTS_AT: Final = _HEAD.size + _WANTED * _QUESTION.size
_ARENA_AT: Final = _SLOTS_AT + _SLOTS * ctypes.sizeof(_Slot)


class SharedMemory:
    """The player's side of the memory."""

    def __init__(self, file: Path, *, devices: int) -> None:
        size = _ARENA_AT + _ARENA_BYTES
        with file.open("wb") as made:
            made.truncate(size)
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), size)
        self._map[: _HEAD.size] = _HEAD.pack(devices, 0)
        self._slots = (_Slot * _SLOTS).from_buffer(self._map, _SLOTS_AT)
        self._places: dict[Question, tuple[_Slot, int]] = {}
        self._used = 0
        self._taken = 0

    def wanted(self) -> list[Question]:
        """Return the new questions."""
        _, count = _HEAD.unpack(self._map[: _HEAD.size])
        first = max(self._taken, count - _WANTED)
        self._taken = count
        found = []
        for number in range(first, count):
            at = _HEAD.size + number % _WANTED * _QUESTION.size
            found.append(Question(*_QUESTION.unpack(self._map[at : at + _QUESTION.size])))
        return found

    def answer(self, question: Question, *, error: int, answer: bytes, room: int = 0) -> None:
        """Store an answer; `room` is the size to which it may grow."""
        if question not in self._places:
            self._places[question] = self._make(question, max(room, len(answer), _MIN_ROOM))
        slot, most = self._places[question]
        answer = answer[:most]
        if slot.version:
            slot.version += 1  # even: being written
        start = _ARENA_AT + slot.offset
        self._map[start : start + len(answer)] = answer
        slot.error, slot.length = error, len(answer)
        slot.version += 1

    def _make(self, question: Question, room: int) -> tuple[_Slot, int]:
        at = _place_of(question)
        while self._slots[at % _SLOTS].version:
            at = (at + 1) & _MASK
        slot = self._slots[at % _SLOTS]
        slot.function, slot.device, slot.first, slot.second = question
        slot.offset = self._used
        self._used += (room + 15) // 16 * 16
        return slot, room


def _place_of(question: Question) -> int:
    """Return where the search for a question starts; the same as `place_of` of `stub.c`."""
    at = (
        question.function * 2654435761
        ^ question.device * 2246822519
        ^ question.first * 3266489917
        ^ question.second * 668265263
    ) & _MASK
    at = (at ^ at >> 15) * 739982445 & _MASK
    return at ^ at >> 12
