"""Random loops: the time within a budget, over that of the best other plan in it.

    python -m tests.regret --random 100             # a hundred loops, each by its seed
    python -m tests.regret --random 5 --from 40     # from this seed on

Steps of all kinds, of random sizes and lengths, are differentiated within three budgets
each, and by everything that `tests.benchmarks` compares budgets with. Programs are run
in turn. The best of many that are noisy is too good, so it is run beside the budget
once more, and the ratio of these two counts.
"""
