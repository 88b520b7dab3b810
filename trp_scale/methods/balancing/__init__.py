"""Balancers: task losses -> task weights."""
