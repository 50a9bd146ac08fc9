"""Turns raw answers into plausible readings in base units, over exactly the covered time."""
