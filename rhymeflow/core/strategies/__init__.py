"""The rules of schedules: pure functions of a view of the fleet."""
