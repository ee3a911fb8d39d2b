"""The runtimes: what carries out the coordinator's commands on machines."""
