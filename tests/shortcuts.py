"""Shortcuts of every process of tests: its runs and its looks at flags do not do again what needs no doing.

- A run collects garbage twice before its second step (`loop.garbage_collected_between_steps`), and ZeRO-3 three times
  when it joins the weights. Here they would look each time through all that pytest and every import before it have
  made, a million objects and more, for half of the seconds that a small run takes. tests/unit/training/test_loop.py has
  the run as it is, and so has every run that a launcher starts.
- Where pytest is imported, tyro computes a tenth of what it has cached again, and compares.
- For each flag's text Python parses the module of its settings; they do not change while tests run.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from types import SimpleNamespace

YOUNG = 1
"""The oldest generation of Python's collector that is looked through."""


def take_shortcuts() -> None:
    """From now on in this process."""
    from tyro import _unsafe_cache

    from trp_scale.training import loop

    names = ("get_freeze_count", "enable", "disable", "isenabled")
    kept = {name: getattr(gc, name) for name in names} | {"freeze": lambda: None, "unfreeze": lambda: None}
    for module in (loop, sys.modules.get("deepspeed.runtime.zero.utils")):
        if module is not None:
            module.gc = SimpleNamespace(collect=lambda: gc.collect(YOUNG), **kept)  # type: ignore[attr-defined]
    _unsafe_cache.sys = SimpleNamespace(modules={})  # type: ignore[attr-defined]
    inspect.findsource = functools.cache(inspect.findsource)  # type: ignore[assignment]


def set_old_objects_aside() -> None:
    """Full collections from now on leave out what is there now: all of pytest, torch and the tests, which takes more
    than two seconds each time. A run would put it back, so runs here do not."""
    gc.collect()
    gc.freeze()
