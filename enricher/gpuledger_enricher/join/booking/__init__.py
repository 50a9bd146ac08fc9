"""The entries of a tick: who was on each GPU, and what is booked on whom.

Pure arithmetic over one tick; no state, no pods by name, no bus.
"""
