"""Budgets of random loops and maps, beside the memory that XLA gives their gradients.

What is promised: a gradient never takes more than its budget, it is the same as without
one, and what an error says would do does.
"""
