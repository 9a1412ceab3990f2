"""Programs for devices that are not here.

Of a GPU or a TPU it takes no more than the compiler to learn how much memory a program
has on it, and what runs on its host. `python -m tests.elsewhere KIND` prints a line of
JSON for each case, in a process of its own: JAX must not look for the device itself.

    pip install 'eqloop[targets]'
"""
