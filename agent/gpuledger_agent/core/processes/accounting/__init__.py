"""Accounting of ended processes: recovers GPU use that ticks did not show.

A tick reports the use that the driver's sampling windows show for the listed processes. A process
that starts and ends between two ticks is in no list, and the samples of a process that ends within
a tick lack its last windows. In accounting mode, the driver keeps an accounting entry, called
account here, for each process that has closed a GPU. An account contains the time at which the
process opened the GPU, how long the GPU was open, and the share of that time in which the process's
kernels ran. This package turns such accounts into `ProcessExit`s. With these, the join attributes
use that no tick has reported. Without accounts, ticks have no `ended_processes` and `ended` process
records have no totals; everything else works the same. Other packages use only `ExitMatcher` and
`ExitReporter`, in `ProcessTracker`.

An account becomes an exit in these steps:

1. `exit_matcher` finds the account's process. An account only contains a pid, pids are reused, and
   `/proc` no longer shows a process that has ended. An account belongs to a process if the account
   began within the known part of the process's lifetime: from its start according to `/proc` to its
   last listing. The driver dates accounts by the wall clock. If that clock was set, the boot times
   according to its earlier settings are tried too. Accounts arrive up to a few ticks after the end,
   and are repeated for a few ticks. Therefore the `ended` record waits for the accounts of its GPUs
   (`_MAX_WAIT_TICKS`), and repetitions are recognized by GPU, pid and start. A process that no tick
   listed is in the table if a fast poll listed it. A process that neither a tick nor a fast poll
   listed can be identified only while it is alive. Otherwise its owner is unknown, and its `ended`
   record has no owner.
2. `exit_reporter` keeps the last ticks' use of each GPU: how much busy time was attributed to each
   process, and how much was attributed to no process (`GpuHistory`).
3. Ticks lag behind the driver. Once the time covered by ticks includes the end of the account,
   `ExitReporter` compares the account with the use that ticks have reported. If the account shows
   more use than ticks attributed to the process, the difference is taken from busy time that ticks
   attributed to no process, and reserved for this process. Each second of a GPU is reserved at most
   once, so attributed use never exceeds the device's busy time.

Exits that cannot be reported correctly are left out and counted by reason:

- `unidentified`: the process ended before `/proc` could identify it.
- `undated`: the account has no start, length or use.
- `older`: the account began before the agent started.
- `gpu_gone`: no later tick contains the GPU.
- `too_many`: as many exits were waiting as a record can hold.
"""
