"""The long-term store: GPU use by minute, hour and day, in Delta Lake tables."""
