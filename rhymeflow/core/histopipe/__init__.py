"""HistoPipe (RhymeRL, arXiv 2508.18588): steps laid out over the instances by expected length."""
