"""What a run shows of itself: metrics, the live display, the summary, and looking back.

Holds true: everything here is a fold over what the run has recorded, and nothing here changes the
run. Only the runtime and the command line import this package.
"""
