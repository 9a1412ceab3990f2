"""Leaves: which leaves of a carry a way back needs, and steps without the others."""
