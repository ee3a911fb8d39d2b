"""The simulated body: the same mind, on a cluster of formulas in virtual time."""
