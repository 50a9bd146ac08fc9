# Types of instances.py for Cython, which reads them where the wheel is built; Python never does.


cpdef bint has_instances(list readings)
