"""Whole functions with one budget: what their gradients take, and how long.

Eight functions (`_functions.py`) with budgets from the least to all. What is promised:
the memory is never above the budget, and more memory never takes more time.
"""
