"""How receivers are shown to people: without user, password or query, where tokens may stand."""

from gpuledger.settings.secret import shown_url

__all__ = ["shown_url"]
