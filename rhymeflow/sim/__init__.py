"""The simulated runtime: the same coordinator, on a cluster of formulas in virtual time."""
