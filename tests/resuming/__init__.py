"""Loops that outlive the process."""
