"""Where heavy data lives: tokens in an event store, weights in shared memory.

Holds true: tokens go engine -> trajectory store -> learner and weights go learner -> weight
store -> engine; the coordinator sees neither.
"""
