# Types of shares.py for Cython, which reads them when the wheel is built; Python ignores this file.
# C integers hold numbers that the records bound: a tick's interval, parts per million of it, the
# memory of all its processes together. Products of two such numbers have 128 bits; products of
# three are Python integers if they do not fit (`MAX_PRODUCT`).
cimport cython

from gpuledger.ledger.division cimport (
    Portion, Whole, divide, int128, nearest, parts_per_million, share_out
)

cdef double MAX_PRODUCT
cdef long long PPM
cdef long long NS_PER_SECOND


@cython.final
@cython.no_gc
cdef class Claim(Portion):
    cdef readonly object category
    cdef readonly object container
    cdef readonly object job_id
    cdef public Py_ssize_t rank
    cdef readonly bint is_sampled
    cdef readonly bint has_memory
    cdef readonly bint has_ended
    cdef readonly long long sm_ppm
    cdef readonly long long memory_bytes
    cdef readonly long long busy_ns
    cdef readonly long long booked_bytes
    cdef readonly long long millijoules

    cpdef add(self, process)

@cython.locals(claim=Claim)
cpdef Claim make_claim(category, container=*, Py_ssize_t rank=*, job_id=*)

@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class Split:
    cdef public long long used
    cdef public long long unclaimed
    cdef public long long idle
    cdef public list idle_parts
    cdef public object method

    cpdef divide_idle(self, numerator, denominator, allocated)
    cpdef idle_of(self, Py_ssize_t part)

@cython.locals(split=Split)
cpdef Split make_split(long long used, long long idle, method)

@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class Energy:
    cdef readonly long long millijoules
    cdef readonly object floor_numerator
    cdef readonly object floor_denominator
    cdef readonly object method
    cdef readonly object idle_draw_milliwatts
    cdef readonly object idle_draw_source
    cdef readonly long long idle_millijoules


@cython.locals(
    parts=list, busy=Split, memory=Split, joules=Split, host=Claim, unattributed=Claim, is_busy=bint,
    limit_bytes=cython.longlong, reserved_bytes=cython.longlong, unclaimed_ns=cython.longlong,
    unclaimed_bytes=cython.longlong, unclaimed_millijoules=cython.longlong,
)
cpdef book_gpu(
    reading, own, list claims, long long interval_ns, Energy energy, allocated=*, slices=*
)

@cython.locals(
    order=list, ranks=list, of_rank=list, processes=list, found=list, claims=list, claim=Claim,
    jobs=Py_ssize_t, host=Py_ssize_t, rank=Py_ssize_t,
)
cpdef list gather_claims(sample)

@cython.locals(
    names=list, of_jobs=list, ranks=list, order=list, name=tuple, index=Py_ssize_t,
    rank=Py_ssize_t, jobs=Py_ssize_t,
)
cdef tuple _rank(containers)

@cython.locals(index=Py_ssize_t)
cdef _rank_jobs(list names, list order, list ranks)

@cython.locals(claim=Claim)
cpdef bint are_unmeasured(list claims)

@cython.locals(
    claim=Claim, split=Split, ppm=cython.longlong, busy_ns=cython.longlong,
    numerator=int128, denominator=int128,
)
cpdef Split split_busy(utilization_ratio, list claims, long long interval_ns, several=*)

@cython.locals(
    claim=Claim, total=int128, denominator=int128, size=double, weights=double,
    large_numerator=object, large_denominator=object,
)
cdef _share_busy(long long busy_ns, list claims, int128 numerator)

@cython.locals(
    claim=Claim, total=cython.longlong, claimed_bytes=cython.longlong, ended=cython.longlong,
    missing=cython.longlong, is_measured=bint,
)
cdef object _weigh(list claims, cython.longlong ppm)

@cython.locals(
    claim=Claim, split=Split, total=cython.longlong, used=cython.longlong,
    numerator=int128, denominator=int128,
)
cpdef Split split_memory(used_bytes, list claims, long long limit_bytes, several=*)

@cython.locals(floor=int128, drawn=int128)
cpdef Energy energy_of(reading, long long interval_ns)

@cython.locals(
    split=Split, size=double, scale=double, length=double,
    small_numerator=int128, small_denominator=int128, numerator=object, denominator=object,
)
cpdef Split split_energy(
    Energy energy, Split busy, list claims, long long interval_ns, several=*
)

@cython.locals(
    claim=Claim, drawn=Whole, beside=Whole, worked=Whole, idle_ns=Whole, idle_exact=Whole,
    idle=Whole, active_exact=Whole, exact=Whole,
)
cdef _split_draw(
    Split split, long long busy_ns, list claims, long long interval_ns,
    Whole floor_numerator, Whole floor_denominator, several
)

@cython.locals(claim=Claim, index=Py_ssize_t)
cdef Claim _claim_of(category, list claims)

cpdef list allocated_times(interval_ns, allocated)

@cython.locals(claim=Claim, entries=list, index=Py_ssize_t)
cdef list _enter(
    list claims, object allocated, list allocated_ns, Split busy, Split memory, Split energy
)
