"""What runs where on a cluster, what memory it takes, and what it would do: `train --dry-run`.

`policy`: the model's sizes, and what cannot run. `placement`: workers on GPUs. `memory`: bytes of
each worker and node. `rates`: tokens a second, by the simulator's cost model. `plan`: all of it,
checked and as text. Nothing is asked of a cluster: the section `cluster` says what there is.
"""
