"""Ids that every process of a simulation derives alike: UUIDs, container ids, pids.

A GPU keeps its UUID over runs, as hardware does. A boot, a pod and a container belong to one run,
so theirs are drawn from its epoch too: two runs on one broker are told apart.
"""

import hashlib
import json
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID, uuid5

from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file

_SPACE: Final = UUID("a2f1c3de-1b0d-5c57-9d0a-7b3a4c0de001")
_FIRST_PID: Final = 2_011
_PID_STEP: Final = 41
_MAX_BYTES: Final = 16 * 2**20  # a hundred thousand pods


def gpu_uuid(seed: int, node: str, index: int) -> str:
    """Return the UUID of a node's GPU as NVML writes it."""
    return f"GPU-{uuid5(_SPACE, f'gpu/{seed}/{node}/{index}')}"


def instance_uuid(what: str) -> str:
    """Return the UUID of a MIG instance as NVML writes it."""
    return f"MIG-{uuid5(_SPACE, f'instance/{what}')}"


def pci_bus_id(index: int) -> str:
    """Return where a GPU is plugged in, as NVML writes it."""
    return f"00000000:{0x1B + 0x10 * index:02X}:00.0"


def run_uuid(seed: int, epoch_ns: int, what: str) -> str:
    """Return the UUID of something that belongs to one run, such as a boot or a pod."""
    return str(uuid5(_SPACE, f"{what}/{seed}/{epoch_ns}"))


def container_id(seed: int, epoch_ns: int, what: str) -> str:
    """Return a container's id, 64 hexadecimal digits."""
    return hashlib.sha256(f"container/{what}/{seed}/{epoch_ns}".encode()).hexdigest()


def pid(seed: int, node: str, order: int) -> int:
    """Return the pid of a node's process by its place among the node's processes."""
    digest = hashlib.sha256(f"pid/{seed}/{node}/{order}".encode()).digest()
    return _FIRST_PID + order * _PID_STEP + digest[0] % _PID_STEP


class Uids(Protocol):
    """Who gives the pods their UIDs."""

    def uid(self, pod_key: str) -> str | None:
        """Return the UID of the pod `namespace/name`; None while the pod has none yet."""


class DerivedUids:
    """UIDs drawn from seed and epoch: for the simulator's own API server, and for unknown pods."""

    def __init__(self, *, seed: int, epoch_ns: int) -> None:
        self._seed = seed
        self._epoch_ns = epoch_ns

    def uid(self, pod_key: str) -> str:
        """Return the pod's UID."""
        return run_uuid(self._seed, self._epoch_ns, f"pod/{pod_key}")


class FileUids:
    """UIDs that a real API server gave, as the driver wrote them into a file.

    The file is read again when a pod is missing. One of another epoch counts as empty.
    """

    def __init__(self, path: Path, *, epoch_ns: int) -> None:
        self._path = path
        self._epoch_ns = epoch_ns
        self._uids: dict[str, str] = {}
        self._version_read: tuple[int, int, int] | None = None

    def uid(self, pod_key: str) -> str | None:
        """Return the pod's UID, or None while the API server has not made it.

        Raises UserError where the file is not what the driver writes.
        """
        if pod_key not in self._uids:
            self._read_again()
        return self._uids.get(pod_key)

    def _read_again(self) -> None:
        try:
            found = self._path.stat()
            # With the inode, as the file is replaced: twice within a tick of the file system's
            # clock it would else look unchanged.
            version = found.st_mtime_ns, found.st_ino, found.st_size
            if version == self._version_read:
                return
            content = json.loads(read_small_file(self._path, max_bytes=_MAX_BYTES))
            if content["epoch_ns"] == self._epoch_ns:
                self._uids = dict(content["uids"])
            self._version_read = version
        except FileNotFoundError:
            return  # the driver has not written it yet; the pod is asked for again
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path}: not a file of pod UIDs ({error}); "
                "`python -m gpuledger_simulator drive --uids` writes it"
            ) from error


def write_uids(path: Path, *, epoch_ns: int, uids: dict[str, str]) -> None:
    """Write the file that `FileUids` reads, whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps({"epoch_ns": epoch_ns, "uids": uids}, indent=1, sort_keys=True))
    draft.replace(path)
