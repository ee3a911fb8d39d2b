"""HistoPipe (RhymeRL, arXiv 2508.18588): steps laid out over the instances by expected length.

`layout` says which groups of a step go to which instances, `pipeline` remembers it, `strategies`
are the rules that keep to it. The rest of the coordinator knows the pipeline as a `Layout` only.
"""
