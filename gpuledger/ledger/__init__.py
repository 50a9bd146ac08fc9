"""The concepts of the books, shared by what writes, reads and checks them.

What is booked, how it sums, and whether it does (`quantities`), the entries of an event and whose
they are (`entries`), the flat row that topic and store share (`rows`), the series that remote-write
and OTLP share (`series`), who holds a device (`holders`), and the rounding of all that is split
(`division`). Pure: records in, values out. How a tick is booked is the join's.
"""
