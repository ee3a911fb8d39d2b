"""The real bodies: what carries out the mind's commands on machines."""
