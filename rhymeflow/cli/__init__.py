"""The command line: one small function per command.

0 on success; 2 on bad input, with one line on stderr that says what and where; 1 if a worker died
or hangs, or the disk is full; 130 after Ctrl-C; 141 where who reads the output stopped. A defect
keeps its traceback. What a command needs is imported when it is called, so that `rhymeflow --help`
is quick.
"""

from rhymeflow.cli.dispatch import main as main
