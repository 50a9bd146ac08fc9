"""The books' own concepts, for all who write, read or check them.

What is booked and how it sums (`quantities`), the entries of an event and whose they are
(`entries`), the flat row that topic and store share (`rows`), the series that remote-write and OTLP
share (`series`, `event_series`), who holds a device (`holders`), and the law that the entries of a
device sum to it (`conservation`). Pure: records in, values out. How a tick is booked is the join's.
"""
