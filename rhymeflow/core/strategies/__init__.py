"""The rules that schedules are made of: pure functions of a view of the fleet."""
