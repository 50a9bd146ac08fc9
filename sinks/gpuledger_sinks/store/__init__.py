"""The long-term store: what was used by minute, hour and day, in Delta Lake tables."""
