"""Adversary: perturbations that ascend on the loss while the weights descend (AdPE). The hooks are in
positions.py."""
