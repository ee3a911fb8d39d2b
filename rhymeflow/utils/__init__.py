"""Small things of the operating system and the interpreter that know nothing of training."""
