"""The staleness protocol, and the states of groups and their members.

`staleness` decides in which batch each group holds one of the `entries` of a `buffer`; `group`
says how far each member has come."""
