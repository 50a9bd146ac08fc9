# Types of division.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython

cdef extern from *:
    ctypedef long long int128 "__int128"

cdef extern from "<math.h>":
    # Rounds halves to even, as Python's round() does.
    long long round "llrint" (double)

# Compiled for C's numbers and for Python's, which grow.
ctypedef fused Whole:
    int128
    object

ctypedef fused Total:
    long long
    object

cdef class Portion:
    cdef public long long weight
    cdef public long long part

cpdef long long parts_per_million(double ratio)

@cython.locals(
    size=double, scale=double, amount=double, small_total=int128, small_numerator=int128,
    small_denominator=int128,
)
cpdef part_of(total, numerator, denominator)

cpdef Whole nearest(Whole total, Whole numerator, Whole denominator)

@cython.locals(
    size=double, scale=double, weight=double, largest=double, small_total="long long",
    small_numerator=int128, small_denominator=int128,
)
cpdef list divide(total, list weights, numerator, denominator)

@cython.locals(
    exact=Whole, lost=Whole, max_lost=Whole, weight=Whole, part=Total, left=Total,
    parts=list, remainders=list, index=Py_ssize_t, first=Py_ssize_t,
)
cdef list _divide(Total total, list weights, Whole numerator, Whole denominator)

@cython.locals(
    share=Portion, first=Portion, left="long long", part="long long", lost=Whole, max_lost=Whole,
    remainders=list, index=Py_ssize_t,
)
cpdef share_out(long long total, list shares, Whole numerator, Whole denominator)
