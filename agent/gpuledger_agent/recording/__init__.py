"""What a machine's NVML and `/proc` answered, kept in a file and played again.

Nothing here is loaded by an agent that reads its own machine.
"""
