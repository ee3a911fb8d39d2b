"""The command line: one small function per command.

Exit codes: 0 on success; 2 on bad input, with one line on stderr; 1 if a worker died or hangs, or
the disk is full; 130 after Ctrl-C; 141 if the reader of a pipe has ended. A defect keeps its
traceback. A command imports what it needs when it is called, so that `rhymeflow --help` is quick.
"""

from rhymeflow.cli.dispatch import main as main
