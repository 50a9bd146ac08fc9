"""Accounting of ended processes: recovers GPU use that ticks did not show.

A tick books the use that the driver's sampling windows show for the listed processes. A process
that starts and ends between two ticks is in no list, and a process that ends within a tick lacks
its last windows. In accounting mode, the driver keeps an account of each process that has closed a
GPU. It contains the time at which the process opened the GPU, how long the GPU was open, and the
share of that time in which the process's kernels ran. This package turns such accounts into
`ProcessExit`s, from which the join books use that no tick has booked. Without accounts, ticks have
no `ended_processes` and records of ends have no totals; everything else works the same. Only
`ExitMatcher` and `ExitReporter` are used from outside, by `ProcessTracker`.

An account becomes an exit in these steps:

1. `exit_matcher` finds the account's process. The driver only names a pid, pids are reused, and
   `/proc` forgets a process when it ends. An account belongs to a process if it began within the
   known part of its lifetime: from its start according to `/proc` to its last listing. The driver
   dates accounts by the wall clock, which may have been set, so the boot times by all recent clocks
   are tried. Accounts arrive up to some ticks after the end, and are repeated for some ticks.
   Therefore an end waits for the accounts of its GPUs (`_MAX_WAIT_TICKS`), and repetitions are
   recognized by GPU, pid and start. A process that no tick listed is in the table if a fast poll
   listed it. A process that neither a tick nor a fast poll listed can be identified only while it
   is alive. Otherwise the account's owner is unknown, and the record of the end has no owner.
2. `exit_reporter` keeps the last ticks' use of each GPU: how much busy time was attributed to each
   process, and how much was attributed to no process (`GpuHistory`).
3. When ticks cover the end, `ExitReporter` compares the account with that use. Use in the account
   that ticks did not attribute to the process is reserved in busy time without a process. Each
   second of a GPU is reserved at most once, so booked use never exceeds the device's busy time.

Exits that cannot be reported correctly are left out and counted by reason:

- `unidentified`: the process ended before `/proc` could identify it.
- `undated`: the account has no start, length or use.
- `older`: the account began before the agent started.
- `gpu_gone`: no later tick contains the GPU.
- `too_many`: as many exits were waiting as a record can hold.
"""
