"""Balancers: task losses -> weights. settings.py has what a recipe says of each, and one file holds each method."""
