# Types of minute_sums.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython

cdef class Sums:
    cdef public object busy_ns, measured_busy_ns, memory_byte_ns, measured_memory_byte_ns
    cdef public object energy_millijoules, measured_energy_millijoules, allocated_ns, unresponsive_ns
    cdef public object scaled_allocated_ns, sm_active_ns, tensor_active_ns, dram_active_ns
    cdef public long long sample_count, first_offset, last_offset
    cdef public object ingested_time_ns
    cpdef add(
        self, Booking booking, object busy_ns, object memory_byte_ns, object energy_millijoules,
        object allocated_ns,
    )
    cpdef add_active(self, object amounts)

cpdef plus(object former, object amount)

cdef class EventOwners:
    cdef object _event
    cdef list _allocatees, _users
    @cython.locals(index="long long")
    cpdef tuple of(self, object entry)
    cdef tuple _user_at(self, object position)
    cdef tuple _allocatee_at(self, object position)
    cdef _pod_at(self, object position)

cdef class Booking:
    cdef public object active, entries
    cdef public list owners
    cdef public tuple device
    cdef public object end_ns, interval_ns
    cdef public bint is_scaled, is_unresponsive, is_tick, measures_busy, measures_memory, measures_energy

cdef class MinuteSums:
    cdef dict _nodes
    cdef public long long row_count
    cdef public set minutes
    cdef dict _rows_of(self, dict by_minute, object minute, tuple device)

cpdef add_part(Sums sums, Booking booking, Py_ssize_t index, object entry, tuple part)
cpdef portion(object amount, object from_ns, object to_ns, object interval_ns)
cdef bint is_one_of(object method, frozenset measured)
