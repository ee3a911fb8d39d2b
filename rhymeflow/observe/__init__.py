"""What a run shows of itself: metrics, the live display, the summary, and looking back."""
