"""The entries of a tick: who used each GPU, and how much is booked on each account.

Pure arithmetic on one tick: no state, no pod names, no bus.
"""
