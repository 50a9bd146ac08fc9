# Types of idle.py for Cython, which reads them where the wheel is built; Python never does.


cpdef list idle_entries(tuple idle, holders, method)
cdef tuple _part_of(tuple idle, double ratio)
cdef _entry(tuple idle, method, allocation=*)
