"""`medialane compare`: traffic that is replayed against two servers in turns, and what each made of it.

Theory of operation. `formats` reads what users have (recordings of a gateway, batch files, traces, datasets) as
requests that are made when their turn comes. `replay` sends them to one server at their times, or some at a time, and
`journal` keeps each reply as it comes, so that an interrupted comparison goes on where it was, and says what it has.
From the replies alone follow the figures of a side (`summary`) and whether the answers agree (`agreement`); both make a
`report`, which is shown as a table, and written as JSON and as a page (`page`).

The servers are those of `check`: plain vLLM and `medialane serve`, each at its defaults, one at a time; or any that run
already.
"""
