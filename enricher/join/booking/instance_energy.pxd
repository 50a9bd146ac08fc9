# Types of instance_energy.py for Cython, which reads them where the wheel is built; Python never does.
from enricher.join.booking.energy cimport energy_of


cpdef list drawn_by_rows(list readings, double seconds)
