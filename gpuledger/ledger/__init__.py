"""The concepts of the books, shared by what writes, reads and checks them.

What is booked, how it sums, and whether it does (`quantities`), the entries of an event and whose
they are (`entries`), the flat row that topic and store share (`rows`), the series that are sent
(`families`, `series`), to whom a device is allocated (`allocated_parts`), and the rounding of all
that is split (`division`). What remote-write makes of ticks beyond that: counters (`usage`), means
over intervals (`interval_values`), and the health of GPUs (`health`).
Pure: records in, values out. How a tick is booked is the join's.
"""
