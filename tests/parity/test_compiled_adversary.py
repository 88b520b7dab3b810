"""The loop on a compiled model, with an adversary: the run of the model that is not compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from tests.grids import always
from tests.parity.compare import too_far
from tests.parity.test_adversary import changes, moved, reference, vector_too_far
from tests.synthetic import Layout
from tests.synthetic_images import run_images

# What the passes over the window see: the parallel one always asks for the perturbation's gradient; of the sequential
# ones the first asks for it, the second does not. By blocks: one of the encoder, one of the decoder.
GRAPHS = {("whole", "parallel"): 1, ("whole", "sequential"): 2, ("blocks", "parallel"): 2, ("blocks", "sequential"): 4}


@pytest.mark.parametrize(("how", "update"), always(GRAPHS))
def test_a_compiled_run_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, how: str, update: str) -> None:
    """Traced forward and backward by aot_eager; the default backend would add minutes of a C++ compiler."""
    settings = changes("relative_coordinate", update=update)
    theirs = reference(settings)
    moved(theirs)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    ours = run_images(Layout(micro_size=2), {**settings, "training": {**settings["training"], "compile": how}})
    assert counters["stats"]["unique_graphs"] == GRAPHS[how, update], "compiled anew in the run, or never"
    assert too_far(ours, theirs) == [] and vector_too_far(ours, theirs, 1e-6, 1e-6) == []
