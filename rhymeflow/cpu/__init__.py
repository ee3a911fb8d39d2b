"""Kernels for CPUs. Each has a torch equivalent, against which it is tested.

    attention          the engine's, through its cache: ragged spans, linear and tree drafts
    packed_attention   the learner's, within a packed row's sequences, and its gradient
    products           linear layers with a weight packed once for oneDNN
    tiles              products and transposition in registers, from which attention is built

Law 3 demands that a row's result is the same to the last bit whatever else is computed with it, in
any number of threads; so the order of each sum depends on the row's own sequence alone. Each kernel
makes a run of the demo or of smollm2 at least 1.1 times faster (docs/lab-log.md has the figures).
"""

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported
