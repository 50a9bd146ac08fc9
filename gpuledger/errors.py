"""All errors that this project raises, grouped by how a caller can handle them.

    GpuledgerError
    ├── UserError              print it in one line, exit 2
    │   ├── SettingsError
    │   ├── ArgumentError
    │   ├── TopicsError        (also a BusError)
    │   └── RefusedError       (also a BusError)
    ├── BusError               a service waits and tries again, even if a user must fix the cause
    │   ├── BusUnavailableError
    │   ├── TopicsError
    │   ├── RefusedError
    │   └── MessageTooLargeError   publish it smaller or, if possible, not at all
    ├── NotAssignedError       the group was rebalanced: poll, and use the new assignment
    ├── FreshStartError        log it in one line, exit 1
    ├── UndecodableError       write the record to the dead letters and continue
    ├── FencedError            another process took over the work: drop it, do not repeat it
    └── UnavailableError       try again later
        └── BusUnavailableError

A `UserError` ends a command for people. It ends a service only if it is not a `BusError`: a service
retries after a `BusError`, because topics may be created and permissions granted while it runs.
Code that calls a library catches the library's exceptions and raises one of these errors instead.
"""


class GpuledgerError(Exception):
    """Base class of all errors that this project raises on purpose."""


class UserError(GpuledgerError):
    """An error that the user can fix; the error message names problem and remedy in one line."""


class SettingsError(UserError):
    """A setting is unknown, invalid or missing."""


class ArgumentError(UserError):
    """An option of a command, or a parameter of a request, is invalid."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name, self.problem = name, problem


class BusError(GpuledgerError):
    """The bus currently cannot do what was requested; the message names the remedy."""


class TopicsError(UserError, BusError):
    """A topic does not exist, differs from the topic table, or cannot be created or deleted."""


class RefusedError(UserError, BusError):
    """The brokers deny a request; the message names the remedy, such as a missing permission."""


class MessageTooLargeError(BusError):
    """A message exceeds the maximum; the error names its topic, key, size and the maximum.

    Code that makes messages from records checks their size first. So if a service receives this
    error, the topic rejects a message of valid size. The service then waits until a user has fixed
    the topic, as for a missing permission.
    """


class NotAssignedError(GpuledgerError):
    """The group gave this partition to another member; the next poll has the new assignment."""


class FreshStartError(GpuledgerError):
    """The process cannot recover from its current state, but a restarted one may."""


class UndecodableError(GpuledgerError):
    """A record is not valid for its topic; the error message names topic, field and value."""


class FencedError(GpuledgerError):
    """Another process took over the work, so nothing of this process's last attempt was stored."""


class UnavailableError(GpuledgerError):
    """An external service did not answer; the same call may succeed later."""


class BusUnavailableError(UnavailableError, BusError):
    """The broker did not answer, or did not acknowledge a message, in time."""


class TimestampRefusedError(BusUnavailableError):
    """The broker rejected a record whose time is too far ahead of the broker's clock.

    Either this machine's clock or the broker's clock may be wrong.
    """
