"""Probes: how far the features of a frozen encoder tell classes apart. They are computed once, and kept."""
