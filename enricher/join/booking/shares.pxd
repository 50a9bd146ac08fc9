# Types of shares.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython


@cython.final
@cython.freelist(64)
cdef class Claim:
    cdef readonly object account
    cdef readonly object container
    cdef readonly object sm_ratio
    cdef readonly object memory_bytes
    cdef readonly bint has_ended

    cpdef add(self, process)


@cython.final
@cython.freelist(8)
cdef class BusySplit:
    cdef readonly list weights
    cdef readonly double seconds_per_weight
    cdef readonly double ended_seconds
    cdef readonly double worked_seconds
    cdef readonly object method


@cython.final
@cython.freelist(8)
cdef class MemorySplit:
    cdef readonly list held_bytes
    cdef readonly double seconds_per_byte
    cdef readonly double unclaimed_byte_seconds
    cdef readonly double free_byte_seconds


@cython.final
@cython.freelist(16)
cdef class Energy:
    cdef readonly double joules
    cdef readonly double floor_joules
    cdef readonly double idle_joules


@cython.final
@cython.freelist(8)
cdef class EnergySplit:
    cdef readonly double watts
    cdef readonly double unclaimed_joules
    cdef readonly double idle_joules


@cython.final
@cython.freelist(8)
cdef class RowSplits:
    cdef readonly BusySplit busy
    cdef readonly MemorySplit memory
    cdef readonly EnergySplit energy
    cdef readonly object method

    cpdef entry(self, account, container, double seconds, double byte_seconds, double joules)


cpdef list book_gpu(reading, list claims, double seconds, Energy energy, holders=*)

@cython.locals(claim=Claim, on_gpu=dict, found=list, keys=list, key=Py_ssize_t, ended=bint)
cpdef list gather_claims(sample)

@cython.locals(total=double)
cpdef double add_up(list weights)

@cython.locals(claim=Claim)
cpdef bint are_unmeasured(list claims)

@cython.locals(
    claim=Claim, ratios=list, ended=list,
    ratio=double, busy_seconds=double, total=double, missing=double, of_ended=double, rate=double,
)
cpdef BusySplit split_busy(utilization_ratio, list claims, double seconds)

@cython.locals(claim=Claim, held=list, ones=list, total=double)
cdef BusySplit _split_by_memory(double busy_seconds, list claims)

@cython.locals(claim=Claim, held=list, total=double, limit=double, used=double, free=double)
cpdef MemorySplit split_memory(used_bytes, list claims, double seconds, limit_bytes)

@cython.locals(joules=double)
cpdef Energy energy_of(reading, double seconds)

@cython.locals(worked=double, floor_watts=double, watts=double)
cpdef EnergySplit split_joules(Energy energy, worked_seconds, double seconds)

@cython.locals(
    busy=BusySplit, memory=MemorySplit, energy=EnergySplit, claim=Claim, entries=list,
    index=Py_ssize_t, watts=double, seconds=double, byte_seconds=double,
)
cdef list _book_claims(list claims, RowSplits splits, double reserved)

@cython.locals(
    busy=BusySplit, memory=MemorySplit, energy=EnergySplit,
    worked=double, seconds=double, byte_seconds=double, joules=double,
)
cdef _book_unclaimed(list entries, list claims, RowSplits splits, reading)

@cython.locals(
    busy=BusySplit, memory=MemorySplit, energy=EnergySplit, parts=list,
    idle_seconds=double, byte_seconds=double, joules=double, held=double, ratio=double,
)
cdef _book_idle(list entries, RowSplits splits, double seconds, holders)
