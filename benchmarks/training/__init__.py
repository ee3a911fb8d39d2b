"""Real training runs: started on chosen cores, then read from their metrics and event log."""
