"""What processes used that ticks did not show: those that came and went between two of them.

A tick books what the driver's sampling windows say of the processes that it lists. A process that
starts and ends between two ticks is in no list, and one that ends in the middle of a tick leaves
out its last windows. Where accounting mode is on, the driver keeps an account of each process that
is done with a GPU: when it opened the GPU, for how long it held it, in which share of that time its
kernels ran. This folder turns such accounts into `ProcessExit`s, from which the join settles what
no tick has booked. Without it everything else works the same: ticks have no `ended_processes`,
records of ends have no totals. Others use `ExitMatcher` and `ExitReporter`, which `ProcessTracker`
puts together, and nothing else of it.

How an account becomes an exit, in the order of the modules:

1. `exit_matcher` finds whose an account is. The driver names a pid only, pids are given again, and
   `/proc` forgets a process with its end. An account is a process's if it began within that
   process's lifetime as far as we saw it: from its start by `/proc` to when it was listed last. The
   driver dates accounts by the wall clock, which may have been set, so each time of the node's boot
   by a clock of late is tried. Accounts come up to some ticks after the end, and are repeated for
   some, so an end waits for the accounts of its GPUs (`_MAX_WAIT_TICKS`) and repeated accounts are
   known by GPU, pid and start. A process that no tick ever listed is in the table where a fast
   poll showed it; one that neither a tick nor a fast poll listed is known if it lives on. If not,
   its account belongs to nobody who can be named, and is reported so.
2. `exit_reporter` keeps, for each GPU, what the last ticks said: how much busy time each process
   was given, and how much was left to nobody (`GpuHistory`).
3. It compares the two when ticks cover the end (`ExitReporter`): what the account says, less what
   ticks said of that process, is looked for in the time that was nobody's, and reserved there. A
   second of a GPU is reserved once, so the books never hold more than the device had.

What cannot be reported rightly is left out and counted by reason: a process that nobody saw
(`unidentified`), an account without times (`undated`), one from before the agent's start (`older`),
one of a GPU that does not come back (`gpu_gone`), more than a record may hold (`too_many`).
"""
