"""The store as sums of time: of whom, on which devices, as which kind."""
