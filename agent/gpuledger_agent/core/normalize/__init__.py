"""From raw answers to readings: plausible, in base units, over exactly the covered time."""
