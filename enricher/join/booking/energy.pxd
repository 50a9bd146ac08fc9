# Types of energy.py for Cython, which reads them where the wheel is built; Python never does.
cimport cython


@cython.locals(joules=double, floor=double)
cpdef tuple energy_of(reading, double seconds)

@cython.locals(joules=double, floor=double, of_idle=double, floor_watts=double, watts=double)
cpdef tuple split_joules(tuple drawn, worked, double seconds)
