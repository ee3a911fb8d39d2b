"""The engine written here: exact, for CPUs and for the study of drafts."""
