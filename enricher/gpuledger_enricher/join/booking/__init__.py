"""Makes the entries of a tick: how much each pod, each job and the host used of each GPU.

Pure arithmetic on one tick: no state, no pod names, no bus.
"""
