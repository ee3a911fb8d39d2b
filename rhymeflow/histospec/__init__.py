"""HistoSpec: drafts from earlier responses (RhymeRL, section on HistoSpec)."""

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported
