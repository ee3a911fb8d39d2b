"""The rules that schedules are made of: pure functions of a view of the fleet.

`base` says what a rule sees and may answer; `routing`, `sync` and `migration` hold the rules;
`schedules` bundles them, with those of `core/histopipe`.
"""
