"""The loops of other libraries, run with a budget by `Reschedule`.

    python -m tests.libraries                  # everything, as a table
    python -m tests.libraries --only 'Flax*'   # cases whose names are like this
    python -m tests.libraries --write PAGE     # puts the table into a page

The losses (`_cases.py`) call ten libraries as these are, and their loops are in there.
A case is wrong (`_judging.py`) if its gradient with a quarter of the memory

- is another one than that of the loss as it is,
- takes more than that quarter, or
- takes more than 1.3 times as long.

It takes half an hour or more, and `pip install 'eqloop[libraries]'`. A case whose
library is not installed is left out.
"""
