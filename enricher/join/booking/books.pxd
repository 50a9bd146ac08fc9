# Types of books.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython
from enricher.join.booking.claims cimport Claim, gather_claims
from enricher.join.booking.energy cimport split_joules
from enricher.join.booking.idle cimport idle_entries
from enricher.join.booking.instance_energy cimport drawn_by_rows
from enricher.join.booking.shares cimport split_busy, split_memory


@cython.locals(seconds=double, claims=list, energy=list, place=Py_ssize_t)
cpdef list book_tick(sample)

@cython.locals(worked=double, free=double, of_idle=double, entries=list)
cpdef list book_gpu(reading, list claims, double seconds, tuple drawn, holders=*)

cdef tuple _split_memory(reading, list claims, double seconds, reserved)

@cython.locals(
    claim=Claim, entries=list, place=Py_ssize_t,
    rate=double, of_ended=double, seconds=double, watts=double, time=double, size=double,
)
cdef list _book_claims(list claims, tuple splits, double reserved)

@cython.locals(worked=double, watts=double, drawn=double, size=double, time=double, energy=double)
cdef _book_nobody(list entries, list claims, tuple splits, reading)
