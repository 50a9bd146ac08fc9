"""Ids that every process of a simulation derives identically: UUIDs, container ids, pids.

A GPU keeps its UUID across runs, as real hardware does. Boots, pods and containers belong to one
run, so their ids also depend on the epoch of the run. This keeps two runs on one broker separate.
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
_MAX_BYTES: Final = 16 * 2**20  # enough for a hundred thousand pods


def gpu_uuid(seed: int, node: str, index: int) -> str:
    """Return the UUID of a node's GPU in NVML's format."""
    return f"GPU-{uuid5(_SPACE, f'gpu/{seed}/{node}/{index}')}"


def instance_uuid(what: str) -> str:
    """Return the UUID of a MIG instance in NVML's format."""
    return f"MIG-{uuid5(_SPACE, f'instance/{what}')}"


def pci_bus_id(index: int) -> str:
    """Return a GPU's PCI bus id in NVML's format."""
    return f"00000000:{0x1B + 0x10 * index:02X}:00.0"


def run_uuid(seed: int, epoch_ns: int, what: str) -> str:
    """Return a UUID for an object that belongs to one run, such as a boot or a pod."""
    return str(uuid5(_SPACE, f"{what}/{seed}/{epoch_ns}"))


def container_id(seed: int, epoch_ns: int, what: str) -> str:
    """Return a container id of 64 hexadecimal digits, which belongs to one run."""
    return hashlib.sha256(f"container/{what}/{seed}/{epoch_ns}".encode()).hexdigest()


def pid(seed: int, node: str, order: int) -> int:
    """Return the pid of the process at position `order` among the node's processes."""
    digest = hashlib.sha256(f"pid/{seed}/{node}/{order}".encode()).digest()
    return _FIRST_PID + order * _PID_STEP + digest[0] % _PID_STEP


class Uids(Protocol):
    """A source of pod UIDs."""

    def uid(self, pod_key: str) -> str | None:
        """Return the UID of the pod `namespace/name`; `None` if the pod has no UID yet."""


class DerivedUids:
    """UIDs derived from seed and epoch, for pods outside a real API server."""

    def __init__(self, *, seed: int, epoch_ns: int) -> None:
        self._seed = seed
        self._epoch_ns = epoch_ns

    def uid(self, pod_key: str) -> str:
        """Return the pod's UID."""
        return run_uuid(self._seed, self._epoch_ns, f"pod/{pod_key}")


class FileUids:
    """UIDs that a real API server assigned, read from the file that `drive` writes.

    The file is read again if a pod is missing. A file with another epoch is ignored.
    """

    def __init__(self, path: Path, *, epoch_ns: int) -> None:
        self._path = path
        self._epoch_ns = epoch_ns
        self._uids: dict[str, str] = {}
        self._version_read: tuple[int, int, int] | None = None

    def uid(self, pod_key: str) -> str | None:
        """Return the pod's UID; `None` if the API server has not created the pod yet.

        Raise `UserError` if the file cannot be read or was not written by `drive`.
        """
        if pod_key not in self._uids:
            self._read_again()
        return self._uids.get(pod_key)

    def _read_again(self) -> None:
        try:
            found = self._path.stat()
            # The file is replaced on each write, so the inode detects two writes within one tick of
            # the file system's clock.
            version = found.st_mtime_ns, found.st_ino, found.st_size
            if version == self._version_read:
                return
            content = json.loads(read_small_file(self._path, max_bytes=_MAX_BYTES))
            if content["epoch_ns"] == self._epoch_ns:
                self._uids = dict(content["uids"])
            self._version_read = version
        except FileNotFoundError:
            return  # `drive` has not written the file yet; the next call tries again
        except OSError as error:
            raise UserError(f"{self._path}: cannot read the file: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._path}: invalid file of pod UIDs ({error}); "
                "create it with `python -m gpuledger_simulator drive --uids`"
            ) from error


def write_uids(path: Path, *, epoch_ns: int, uids: dict[str, str]) -> None:
    """Write the file that `FileUids` reads, atomically, so that a partial file is never read."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps({"epoch_ns": epoch_ns, "uids": uids}, indent=1, sort_keys=True))
    draft.replace(path)
