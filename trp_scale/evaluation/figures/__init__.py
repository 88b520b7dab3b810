"""Figures and pictures of a trained encoder."""
