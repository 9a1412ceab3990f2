"""What the compilers of devices that are not here make of the library's loops.

    python -m tests.targets                            # everything, and what is wrong
    python -m tests.targets --only loops --kinds v5e   # a group, for one kind of device
    python -m tests.targets --match 'gru: *'           # cases whose names are like this
    python -m tests.targets --write docs/on_a_gpu_and_a_tpu.md
    python -m tests.targets --render docs/on_a_gpu_and_a_tpu.md
    python -m tests.targets --run gpu --workers 8      # here, to see that it is right
    python -m tests.targets --only fused               # cells as kernels: `cells.py`

Every schedule, loop and map is compiled, on the steps of the benchmarks and in the
modes in which they are used (`_cases.py`). Nothing is run, but with `--run`
(`_runs.py`). The optimised programs are read (`_hlo.py`), and a case is wrong
(`_verdicts.py`) if

- it takes more memory than its plan says,
- the processor of the host computes anything,
- a loop copies the slots, or `xs`, in each of its iterations, or
- a loop whose length is known has a number of trips that is not, on a GPU, which then
  waits for its host at each of them.

With `--write`, the figures of the page (a JSON file beside it) are extended by cases
that are not there yet, so that one can stop and go on; `--again` compiles all of them.
It takes two hours, and `pip install 'eqloop[targets]'`.

On a GPU, XLA may try for minutes which kernel is the fastest for each large product;
with `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` it tries those of libraries only.
"""
