"""Sums the store's time by party, device and category."""
