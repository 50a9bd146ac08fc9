# Types of claims.py for Cython, which reads them where the wheel is built; Python never does.
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


@cython.locals(claim=Claim, on_gpu=dict, found=list, homes=list)
cpdef list gather_claims(sample)

cdef list _with_host_last(dict on_gpu)
cdef bint _shows_nothing(container)

@cython.locals(ended=bint)
cdef Claim _open(home, first)
