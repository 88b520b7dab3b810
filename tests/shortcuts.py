"""Shortcuts for test processes: skip repeated garbage collections, checks of caches, and parsing.

- A run collects garbage twice before its second step (`loop.garbage_collected_between_steps`), and ZeRO-3 three times
  when it gathers the weights. A full collection would scan all objects of pytest and the imports, over a million, which
  takes half of the time of a small run. tests/unit/training/test_loop.py tests the real collector, and so does every
  run that a launcher starts.
- If pytest is imported, tyro recomputes a tenth of its cached results and compares.
- Python parses a settings module again for the help text of each flag; modules do not change during the tests.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from types import SimpleNamespace

YOUNG = 1
"""Oldest generation that the collector scans."""


def take_shortcuts() -> None:
    """Replace the collector of runs, tyro's checks and `inspect.findsource` in this process."""
    from tyro import _unsafe_cache

    from trp_scale.training import loop

    names = ("get_freeze_count", "enable", "disable", "isenabled")
    kept = {name: getattr(gc, name) for name in names} | {"freeze": lambda: None, "unfreeze": lambda: None}
    for module in (loop, sys.modules.get("deepspeed.runtime.zero.utils")):
        if module is not None:
            module.gc = SimpleNamespace(collect=lambda: gc.collect(YOUNG), **kept)  # type: ignore[attr-defined]
    _unsafe_cache.sys = SimpleNamespace(modules={})  # type: ignore[attr-defined]
    read, cached = inspect.findsource, functools.cache(inspect.findsource)
    # A frame in the cache would keep all that its callers hold, such as an engine.
    inspect.findsource = lambda source: (read if inspect.isframe(source) else cached)(source)


def set_old_objects_aside() -> None:
    """Exclude all current objects from later collections; scanning pytest, torch and the tests takes over two seconds.
    Runs in this process must not undo it: their `gc.freeze` and `gc.unfreeze` do nothing."""
    gc.collect()
    gc.freeze()
