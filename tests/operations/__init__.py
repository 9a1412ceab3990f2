"""Every operation of JAX, by every place where the library interprets programs.

`cases/` has functions of one row that bind the primitives of `jax.lax`, with their
parameters, in all types, on special values (`values.py`). `places.py` has those who
interpret them: kernels, rows in `Fit`, chunks, steps that are rewritten, `ir`,
`Reschedule`. Each result is compared with JAX's (`judging.py`): bits for what moves and
for integers, and else the units in the last place that `TOLERATED` there names. In a
cell of the table, an operation is right, or refused by an error that names it.

`complete.py` has what the table must list: each primitive that JAX has, unless a short
table there says why it is no operation, and at least two values of each parameter.

    python -m tests.operations                          # all of it, about an hour
    python -m tests.operations --only sort,top_k        # some operations
    python -m tests.operations --place fused            # some places
    python -m tests.operations --quick                  # some cases of each
"""
