"""The driver: the seam to NVML and the threads that ask it. What an answer means is not known."""
