"""How addresses are shown to people. What does it lives beside the settings that take them."""

from gpuledger.settings.shown import shown_brokers, shown_url

__all__ = ["shown_brokers", "shown_url"]
