"""Child processes of the library: one way to start them, to exchange messages with them, and to end them.

- `start`: a program of ours in a process of its own, with a socket to it and a pipe that tells it when the run ends.
- `frames` and `streams`: messages with their length in front, for code that blocks and for an event loop.
- `peer`: calls over such a connection, in either direction, as JSON from processes that are not trusted.
- `template`: a process that has loaded code once and is forked for each job.
- `supervisor`: the parent of a process with a user's code, which ends everything that the code started.
- `results`: scores and failures as JSON, checked on arrival.
- `forked`, `inherited`: signals and exit codes that a process must not, or must, hand on to its children.

Imported by processes that must start in milliseconds: nothing here imports torch or numpy, and only what needs an event
loop imports asyncio.
"""
