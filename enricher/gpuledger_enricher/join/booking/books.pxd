# Types of books.py for Cython, which reads them when the wheel is built; Python ignores this file.
cimport cython

from gpuledger_enricher.join.booking.shares cimport Energy, book_gpu, energy_of, gather_claims


@cython.locals(claims=list, energy=list, slices=list, row=Py_ssize_t, length="long long")
cpdef list book_tick(sample)

cpdef bint has_instances(readings)
