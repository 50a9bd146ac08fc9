"""Turns raw answers into plausible readings in base units, for the time that a tick covers."""
