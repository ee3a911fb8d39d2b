"""The staleness protocol, and the states of what it counts.

`staleness` says which batch a group may end up in, on the `entries` of its `buffer`s; `group` says
how far each member of a group has come.
"""
