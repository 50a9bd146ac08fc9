"""`gpuledger store`: what a store needs from time to time, done once."""

import sys
from typing import Annotated, Final

from cyclopts import App, Parameter

from gpuledger.clock import SystemClock
from gpuledger.errors import UserError
from gpuledger.settings.secret import shown_url
from sinks.errors import ReceiverUnavailableError
from sinks.settings import StoreRetentionSettings, StoreSettings
from sinks.store.maintainer import Maintainer

_HELD: Final = 1

app = App(name="store", help="Maintain the tables of a store.")

StoreUri = Annotated[str, Parameter(help="Folder or object-store URI of the store.")]
StorageOption = Annotated[
    tuple[str, ...],
    Parameter(help="name=value, as store.storage_options has it; may be given several times."),
]


def storage_options_of(given: tuple[str, ...]) -> dict[str, str]:
    """Return options of a storage by their names; raises UserError for one without a value."""
    options = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"--storage-option {option}: give it as name=value")
        options[name] = value
    return options


@app.command
def maintain(
    *,
    store: StoreUri,
    storage_option: StorageOption = (),
    usage_days: int = StoreRetentionSettings().usage_days,
    usage_hourly_days: int = StoreRetentionSettings().usage_hourly_days,
    usage_daily_days: int = StoreRetentionSettings().usage_daily_days,
    entries_days: int = StoreRetentionSettings().entries_days,
) -> int:
    """Sum up hours and days, remove what is too old, merge small files; once.

    The days are how long each table keeps its rows, 0 for ever: give those of the sink's settings
    (store.retention). Exit code 1 where somebody else is at it, 2 where the storage does not
    answer.
    """
    settings = StoreSettings(
        uri=store,
        storage_options=storage_options_of(storage_option),
        retention=StoreRetentionSettings(
            usage_days=usage_days,
            usage_hourly_days=usage_hourly_days,
            usage_daily_days=usage_daily_days,
            entries_days=entries_days,
        ),
    )
    try:
        done = Maintainer(settings, clock=SystemClock()).run()
    except ReceiverUnavailableError as error:
        raise UserError(str(error)) from error
    if done.is_held_by_another:
        sys.stderr.write(f"somebody else maintains {shown_url(store)}: nothing was done\n")
        return _HELD
    sys.stdout.write(
        f"summed up: {done.hours} hours, {done.days} days\n"
        f"removed for their age: {done.purged_files} files\n"
        f"merged: {done.compacted_files} files\n"
    )
    return 0
