"""Masks learned from a downstream task by three-level optimisation (MLO-MAE; docs/algorithms.md).

masks.py: masks (eq. 1) and the outer step (eq. 8). head.py: eq. 2, 3, 7, 11. hypergradient.py: eq. 9 after committed
steps, eq. 6 as printed. finite_difference.py: eq. 10, 12, and the exact hypergradient. second_levels.py: eq. 5, 13.
hook.py: Algorithm 1.
"""
