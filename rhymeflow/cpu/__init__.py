"""Arithmetic for CPUs; beside each part torch's own way, which is its oracle in the tests.

    attention          through the engine's cache: ragged spans, drafts in lines and trees
    packed_attention   the learner's, within a packed row's sequences, and its gradient
    products           linear maps by a weight laid out once for oneDNN

Attention is made of `tiles` (products and transposition in registers).

What law 3 demands: a row's result is the same to the last bit whatever else is computed beside it,
in however many threads; so sums are taken in an order that depends on the row's own sequence alone.
What a part has to earn: leaving it out makes a run of the demo or of smollm2 at least 1.1 times
slower (docs/lab-log.md has the figures).
"""

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported
