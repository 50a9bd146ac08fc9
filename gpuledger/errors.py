"""What can go wrong, grouped by what a caller can do about it.

    GpuledgerError
    ├── UserError              say it in one line, exit 2
    │   ├── SettingsError
    │   ├── ArgumentError
    │   ├── TopicsError        (a BusError too)
    │   └── RefusedError       (a BusError too)
    ├── BusError               a service waits and tries again, whoever has to mend it
    │   ├── BusUnavailableError
    │   ├── TopicsError
    │   ├── RefusedError
    │   └── MessageTooLargeError   publish it smaller or not at all, where that can be
    ├── NotAssignedError       the group moved on: poll, and work on what is assigned now
    ├── FreshStartError        say it in one log line, exit 1
    ├── UndecodableError       put the record aside, go on
    ├── FencedError            another took the work over: drop what it was about, do not repeat it
    └── UnavailableError       try again later
        └── BusUnavailableError

A command for people ends with a `UserError`; a service ends with one about its own settings alone
and waits out every `BusError`, as topics are created and rights granted while it runs.
Exceptions of libraries stop at the seam that calls them and become one of these.
"""


class GpuledgerError(Exception):
    """Any error that this project raises on purpose."""


class UserError(GpuledgerError):
    """Something that its user can put right: the message says what and how, in one line."""


class SettingsError(UserError):
    """A setting that is unknown, mistyped or missing."""


class ArgumentError(UserError):
    """An option of a command, or a parameter of a request, that is invalid."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name, self.problem = name, problem


class BusError(GpuledgerError):
    """The bus does not do what was asked for, now; the message says what would make it."""


class TopicsError(UserError, BusError):
    """A topic on the broker that is not as the topic table says."""


class RefusedError(UserError, BusError):
    """The brokers do not allow what was asked for; the message names the right that is missing."""


class MessageTooLargeError(BusError):
    """A message larger than the bus takes; the message names its topic, key, size and the limit.

    Who makes messages of records looks at their size first, so that what gets here is one that a
    topic refuses although it is in bounds. That is waited for, like a right that is missing.
    """


class NotAssignedError(GpuledgerError):
    """The group gave this partition to another member; the next poll says what is assigned now."""


class FreshStartError(GpuledgerError):
    """The process cannot get out of where it is, and one that is started afresh may."""


class UndecodableError(GpuledgerError):
    """A record that is no valid record of its topic; the message names topic, field and value."""


class FencedError(GpuledgerError):
    """Another process took this work over, so what this one was about was refused as a whole."""


class UnavailableError(GpuledgerError):
    """Something outside did not answer; the same call may succeed later."""


class BusUnavailableError(UnavailableError, BusError):
    """The broker did not answer, or did not acknowledge in time."""


class TimestampRefusedError(BusUnavailableError):
    """The broker refused a record as too far ahead of its clock: theirs may be wrong, or ours."""
