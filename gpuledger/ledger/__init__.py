"""Accounting concepts, shared by the code that writes, reads and checks events.

The books of a GPU (`GpuBooks`) are its readings in one tick, and the entries that divide them among
its users.

- `quantities`: the quantities, how their entries add up, and the check that they do
- `entries`: the entries of an event, with their pods, jobs and allocations
- `rows`: the flat row that topic and store share
- `families`, `series`: the time series that are made from events and sent to receivers
- `allocated_parts`: the containers and jobs to which a device is allocated
- `division`: divides whole numbers into parts that add up exactly

For remote-write there are also counters (`usage`), means over intervals (`interval_values`) and the
health of GPUs (`health`). These modules are pure: records in, values out. The join decides how a
tick's usage is attributed.
"""
