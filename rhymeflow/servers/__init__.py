"""Where heavy data lives: tokens in an event store, weights in shared memory.

Holds true: tokens go engine -> trajectory server -> learner and weights go learner -> parameter
server -> engine; the mind sees neither.
"""
