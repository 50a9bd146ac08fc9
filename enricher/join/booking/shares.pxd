# Types of shares.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython
from enricher.join.booking.claims cimport Claim


@cython.locals(claim=Claim, ratio=double, busy_seconds=double)
cpdef tuple split_busy(utilization_ratio, list claims, double seconds)

@cython.locals(claim=Claim)
cdef bint _are_unmeasured(list claims)

@cython.locals(total=double)
cpdef double add_up(list weights)

@cython.locals(claim=Claim, total=double, missing=double)
cdef tuple _split_among(double busy_seconds, list claims, double seconds)

@cython.locals(claim=Claim, total=double)
cdef tuple _split_by_memory(double busy_seconds, list claims)

@cython.locals(claim=Claim, total=double, limit=double, used=double, free=double)
cpdef tuple split_memory(used_bytes, list claims, double seconds, limit_bytes)
