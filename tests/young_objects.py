"""Runs within a process of tests: their garbage collections look through young objects alone.

A run collects twice before its second step (`loop.garbage_collected_between_steps`). Here it would look each time
through all that pytest and every import before it have made, a million objects and more, for half of the seconds that a
small run takes. tests/unit/training/test_loop.py has the run as it is, and so has every run that a launcher starts.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

YOUNG = 1
"""The oldest generation of Python's collector that is looked through."""


def look_through_young_objects() -> None:
    """From now on in this process."""
    from trp_scale.training import loop

    kept = {name: getattr(gc, name) for name in ("enable", "disable", "isenabled")}
    loop.gc = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        collect=lambda: gc.collect(YOUNG), freeze=lambda: None, unfreeze=lambda: None, **kept
    )


def set_old_objects_aside() -> None:
    """Full collections from now on leave out what is there now: all of pytest, torch and the tests, which takes more
    than two seconds each time. A run would put it back."""
    gc.collect()
    gc.freeze()
