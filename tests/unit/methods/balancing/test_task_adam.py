"""Adam over tasks is torch's Adam for each task that is present."""

from __future__ import annotations

import torch

from trp_scale.methods.balancing.base import TaskAdam


def test_it_is_torch_adam_where_tasks_are_present() -> None:
    """A task that is absent in a step keeps its value, moments and step count, as one without a gradient does."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, dtype=torch.float64, generator=generator)
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    theirs, ours = torch.optim.Adam(parameters, lr=0.1), TaskAdam(torch.zeros(3, dtype=torch.float64), lr=0.1)
    for step in range(12):
        gradient = torch.randn(3, dtype=torch.float64, generator=generator)
        present = torch.tensor([True, step % 3 != 1, step > 4])
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient[number].clone() if present[number] else None
        theirs.step()
        values = ours.step(values, gradient, present)
        if step == 6:  # through a checkpoint
            state, ours = ours.state_dict(), TaskAdam(torch.zeros(3, dtype=torch.float64), lr=0.1)
            ours.load_state_dict(state)
        expected = torch.stack([parameter.detach() for parameter in parameters])
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
