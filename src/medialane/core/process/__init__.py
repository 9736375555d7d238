"""This process, those that it starts, and what the kernel says about them.

* `parent_death`: a child ends with its parent, also after kill -9.
* `subreaper`: children that another process forks for us.
* `owner_lock`: files and folders that belong to a live process, and the removal of those whose owner has exited.
* `phase`: what a process does until it is ready, for whoever started it.
* `cpu_time`: whether a process computes, or hangs.
* `title`: what `ps` shows.
* `memory`: how much memory processes use.
* `descendants`: the processes below one.
* `oom_kills`: whether the kernel killed one for lack of memory.
* `libc`: system calls that Python does not wrap.
"""
