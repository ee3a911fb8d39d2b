"""HistoPipe (RhymeRL, arXiv 2508.18588): each step's groups are laid out by expected length."""
