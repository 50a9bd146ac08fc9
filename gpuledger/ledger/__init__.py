"""Concepts of the books, shared by the code that writes, reads and checks them.

- `quantities`: the booked quantities, how they add up, and the check that they do
- `entries`: the entries of an event, with their pods, jobs and allocations
- `rows`: the flat row that topic and store share
- `families`, `series`: the series that are sent
- `allocated_parts`: the containers and jobs to which a device is allocated
- `division`: rounding of everything that is split

For remote-write there are also counters (`usage`), means over intervals (`interval_values`) and the
health of GPUs (`health`). These modules are pure: records in, values out. The join decides how a
tick is booked.
"""
