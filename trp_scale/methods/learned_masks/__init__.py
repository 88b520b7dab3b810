"""Masks learned from a downstream task by three-level optimisation (MLO-MAE; docs/algorithms.md).

settings.py: the kinds. masks.py: eq. 1, the masks and the outer step (eq. 8). head.py: eq. 2, 3, 7, 11.
hypergradient.py: eq. 9 after committed steps, and eq. 6 as printed. finite_difference.py: eq. 10 and 12, and the check.
second_levels.py: eq. 5 and 13. hook.py: Algorithm 1.
"""
