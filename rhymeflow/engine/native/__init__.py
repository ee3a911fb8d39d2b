"""The engine written here: exact, for CPUs and for the study of drafts."""

from rhymeflow.utils import code_cache

code_cache.ensure()  # before numba is imported
