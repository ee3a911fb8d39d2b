"""The one error a user is meant to read.

Everything a user can get wrong (a field, a file, a row, a reward function, a missing package)
raises `UserError` with one line that names what and where; the command line prints that line and
exits with 2. Any other exception is a defect of Rhymeflow and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input: the message says what was given, where, and what would be right."""
