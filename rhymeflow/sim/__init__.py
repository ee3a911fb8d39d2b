"""The simulated runtime: the real coordinator on a cluster that is modelled in virtual time."""
