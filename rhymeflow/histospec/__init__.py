"""HistoSpec: speculative decoding with drafts from earlier responses (RhymeRL, HistoSpec)."""

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported
