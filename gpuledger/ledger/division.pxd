# Types of division.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython

cdef extern from *:
    ctypedef long long int128 "__int128"

cdef extern from "<math.h>":
    # Rounds halves to even, as Python's round() does.
    long long round "llrint" (double)

# Compiled twice: once for C's numbers, once for Python's, which grow.
ctypedef fused Whole:
    int128
    object

cpdef long long parts_per_million(double ratio)

cpdef part_of(total, numerator, denominator)

@cython.locals(small_numerator=int128, small_denominator=int128)
cpdef list divide(total, list weights, numerator, denominator)

@cython.locals(
    exact=Whole, part=Whole, parts=list, remainders=list, left=Py_ssize_t, index=Py_ssize_t,
)
cdef list _divide(Whole numerator, Whole denominator, total, list weights)
