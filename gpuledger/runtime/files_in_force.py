"""What was read of some files and counts: read again once they have changed, and said of.

Here lives what credentials and the web configuration have in common: with a mistake in the files
what was read before stays in force, which a check tells until they are mended. It tells likewise of
certificates that have expired, or are not valid yet, while they are in force.
"""

import time
from collections.abc import Callable, Iterable

from gpuledger.certificates import Validity
from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FileWatch
from gpuledger.runtime.process_metrics import CERTIFICATE_NOT_AFTER
from gpuledger.runtime.readiness import Check


class FilesInForce:
    """The files that were read last without a mistake."""

    def __init__(
        self,
        read_again: Callable[[], Iterable[Validity]],
        *,
        validities: Iterable[Validity],
        watch: FileWatch,
        check: Check,
        on_read: Callable[[list[str]], None],
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Record what was read, whose certificates have these validities.

        `read_again` reads the files and puts them in force, or raises `UserError` and changes
        nothing; `on_read` is told the files when it has.
        """
        self._read_again, self._watch, self._check = read_again, watch, check
        self._on_read, self._time_seconds = on_read, time_seconds
        self._mistake = ""
        self._ends: dict[str, float] = {}
        self._enter(validities)
        self._report()

    def look(self) -> None:
        """Read the files again where they have changed, at most once a second."""
        if not self._watch.has_changed():
            self._report()  # a certificate may have expired meanwhile
            return
        try:
            self._enter(self._read_again())
        except UserError as error:
            self._mistake = f"{error}; what was read before stays in force"
            self._report()
        else:
            self._mistake = ""
            self._report()
            self._on_read(list(map(str, self._watch.files)))

    def _enter(self, validities: Iterable[Validity]) -> None:
        self._validities = tuple(validities)
        ends: dict[str, float] = {}
        for validity in self._validities:
            file = str(validity.file)
            ends[file] = min(ends.get(file, validity.end_seconds), validity.end_seconds)
        for file in self._ends.keys() - ends.keys():
            CERTIFICATE_NOT_AFTER.remove(file)
        for file, end_seconds in ends.items():
            CERTIFICATE_NOT_AFTER.labels(file=file).set(end_seconds)
        self._ends = ends

    def _report(self) -> None:
        now_seconds = self._time_seconds()
        untimely = (validity.mistake_at(now_seconds) for validity in self._validities)
        mistakes = [mistake for mistake in (self._mistake, *untimely) if mistake]
        if mistakes:
            self._check.failed("; ".join(mistakes))
        else:
            self._check.ok(", ".join(map(str, self._watch.files)) or "none of them in a file")
