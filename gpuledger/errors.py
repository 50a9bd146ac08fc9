"""What can go wrong, grouped by what a caller can do about it.

    GpuledgerError
    ├── UserError              say it in one line, exit 2
    │   ├── SettingsError
    │   └── TopicsError
    ├── FreshStartError        say it in one log line, exit 1
    ├── UndecodableError       put the record aside, go on
    ├── FencedError            another took the work over: drop what it was about, do not repeat it
    ├── MessageTooLargeError   publish it smaller or not at all: trying again never helps
    └── UnavailableError       try again later
        └── BusUnavailableError

Exceptions of libraries stop at the seam that calls them and become one of these.
"""


class GpuledgerError(Exception):
    """Any error that this project raises on purpose."""


class UserError(GpuledgerError):
    """Something that its user can put right: the message says what and how, in one line."""


class SettingsError(UserError):
    """A setting that is unknown, mistyped or missing."""


class TopicsError(UserError):
    """A topic on the broker that is not as the topic table says."""


class FreshStartError(GpuledgerError):
    """The process cannot get out of where it is, and one that is started afresh may."""


class UndecodableError(GpuledgerError):
    """A record that is no valid record of its topic; the message names topic, field and value."""


class MessageTooLargeError(GpuledgerError):
    """A message larger than the bus takes; the message names its topic, key, size and the limit."""


class FencedError(GpuledgerError):
    """Another process took this work over, so what this one was about was refused as a whole."""


class UnavailableError(GpuledgerError):
    """Something outside did not answer; the same call may succeed later."""


class BusUnavailableError(UnavailableError):
    """The broker did not answer, or did not acknowledge in time."""


class TimestampRefusedError(BusUnavailableError):
    """The broker refused a record as too far ahead of its clock: theirs may be wrong, or ours."""
