"""Orders: which carries are stored, and in which order the steps are reversed.

`_order.py` says what an order is, and `_tree.py` what follows for those that are made
of others. The arithmetic of each is in a file without JAX:

- `_all_at_once.py` stores the residuals of all steps, as `jax.lax.scan` does.
- `_nested.py` has levels of segments (`Recursive`, `Chunked`), cut by `_levels.py`.
- `_revolved.py` is binomial checkpointing (`Binomial`): `_binomial.py` counts, and
  `_slot_stack.py` is the machine that runs it.
- `_first_and_last.py` has an order for the first steps and one for the last, which may
  store all of their residuals (`StoreLast`).
- `_segmented.py` puts several orders one after the other.
- `_inverted.py` goes back by the inverse of a step (`Reversible`).
"""
