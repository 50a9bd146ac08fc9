# Types of shares.py for Cython, which reads them where the wheel is built; Python never does.
# Numbers that are C's have bounds: a tick's interval, parts per million of it. All others are
# Python's, as their products grow.
cimport cython

from gpuledger.ledger.division cimport divide, part_of, parts_per_million


@cython.final
@cython.freelist(64)
cdef class Claim:
    cdef readonly object account
    cdef readonly object container
    cdef readonly object sm_ppm
    cdef readonly object memory_bytes
    cdef readonly bint has_ended

    cpdef add(self, process)


@cython.final
@cython.freelist(16)
cdef class Split:
    cdef readonly object used
    cdef readonly list of_claims
    cdef readonly object unclaimed
    cdef readonly list idle
    cdef readonly object method


@cython.final
@cython.freelist(16)
cdef class Energy:
    cdef readonly object millijoules
    cdef readonly object floor_numerator
    cdef readonly object floor_denominator
    cdef readonly object method
    cdef readonly object idle_draw_milliwatts
    cdef readonly object idle_draw_source
    cdef readonly object idle_millijoules


@cython.locals(busy=Split, memory=Split, joules=Split, split=Split, splits=list, place=Py_ssize_t)
cpdef book_gpu(reading, own, list claims, interval_ns, Energy energy, held=*)

@cython.locals(claim=Claim, on_gpu=dict, found=list, keys=list, key=Py_ssize_t)
cpdef list gather_claims(sample)

@cython.locals(claim=Claim, pods=list, claims=list, key=Py_ssize_t, pod=tuple)
cdef list _in_order(dict on_gpu, containers)

@cython.locals(claim=Claim)
cpdef bint are_unmeasured(list claims)

@cython.locals(claim=Claim, weights=list, parts=list, idle=list, ppm=cython.longlong)
cpdef Split split_busy(utilization_ratio, list claims, interval_ns, held)

@cython.locals(
    claim=Claim, total=cython.longlong, ended=cython.longlong, missing=cython.longlong,
    is_measured=bint,
)
cdef tuple _weigh(list claims, cython.longlong ppm)

@cython.locals(of_claims=list, idle=list, claim=Claim)
cpdef Split split_memory(used_bytes, list claims, limit_bytes, held)

cpdef Energy energy_of(reading, interval_ns)

@cython.locals(of_idle=list, parts=list)
cpdef Split split_energy(Energy energy, Split busy, list claims, interval_ns, held)

cdef list _divide_idle(total, numerator, denominator, held)

@cython.locals(claim=Claim, split=Split, place=Py_ssize_t)
cdef Py_ssize_t _place_of(account, list claims, list splits) except -1

@cython.locals(split=Split)
cdef bint _has_unclaimed(list splits) except -1

@cython.locals(claim=Claim, entries=list, index=Py_ssize_t)
cdef list _enter(list claims, held, Split busy, Split memory, Split energy)
