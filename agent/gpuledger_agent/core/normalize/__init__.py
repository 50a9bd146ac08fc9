"""Turns raw answers into plausible readings in base units, over exactly the time a tick covers."""
