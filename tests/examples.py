"""How many examples a law of Hypothesis' gets: all of them with `--extended`, else a quarter.

Each run draws others, except for laws that are derandomized: those get the same few each time.
"""

from typing import Final

from hypothesis import HealthCheck, settings

FEW: Final = "few"
ALL: Final = "all"
_USUAL: Final = 100
_PART: Final = 4
# A law does not fail because the machine is busy: with the usual 200 ms for an example it would.
_PATIENT: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def register_profiles() -> None:
    """Have laws that name no number get as many as `examples(100)` gives."""
    settings.register_profile(FEW, _PATIENT, max_examples=_USUAL // _PART)
    settings.register_profile(ALL, _PATIENT, max_examples=_USUAL)
    settings.load_profile(FEW)


def examples(number: int) -> settings:
    """Return the settings of a law that gets so many examples with `--extended`."""
    has_all = settings.get_current_profile_name() == ALL
    return settings(max_examples=number if has_all else -(-number // _PART))
