"""What learned masks cost when automatic differentiation goes through the encoder's step, as a reference.

MLO-MAE eq. 6-11 written down directly, on whole weights in one process: the step's gradient is taken with a graph, the
stepped weights are functions of the masking network, and the validation loss is differentiated by it. That takes a
backward pass through a backward pass, which fused attention does not have, and holds the graphs of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from trp_scale.models.patches import gather_patches, normalised

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Step sizes of gradient descent: encoder and decoder, head; and of the masking network's AdamW."""

    encoder: float = 1e-2
    head: float = 1e-1
    network: float = 1e-3


class UnrolledMasks:
    """Cycles of `unroll` steps of the encoder, one of the head and one of the masking network.

    Args:
        model: a masked autoencoder; its weights are replaced by stepped ones, by gradient descent.
        network: patch embeddings [B, N, D] -> probabilities [B, N].
        classes: of the head.
        visible: patches that are not masked.
        unroll: steps of the encoder; the last of them is differentiated.
        rates: step sizes.
    """

    def __init__(
        self, model: nn.Module, network: nn.Module, *, classes: int, visible: int, unroll: int, rates: Rates
    ) -> None:
        self.model, self.network = model, network
        self.visible, self.unroll, self.rates = visible, unroll, rates
        self.weights: Weights = {name: value.detach() for name, value in model.named_parameters()}
        some = next(iter(self.weights.values()))
        width = self.weights["norm.weight"].numel()
        self.head = [some.new_zeros(classes, width), some.new_zeros(classes)]
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=rates.network)

    def cycle(self, unlabelled: Sequence[Tensor], train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> None:
        """One cycle.

        Args:
            unlabelled: `unroll` batches of patches [B, N, P].
            train: patches [B, N, P] and labels [B] of D_tr.
            held: of D_val.
        """
        self.optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            for patches in unlabelled[:-1]:
                self.weights = detached(self.stepped(patches, create_graph=False))
            loss, weights, head = self.validation_loss(unlabelled[-1], train, held)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.weights, self.head = detached(weights), [value.detach() for value in head]

    def validation_loss(
        self, patches: Tensor, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Weights, list[Tensor]]:
        """L_val(E', C') as a function of the masking network, and E' and C'."""
        weights = self.stepped(patches, create_graph=True)
        head = [value.detach().requires_grad_() for value in self.head]
        gradients = torch.autograd.grad(self.classification(weights, head, *train), head, create_graph=True)
        head = [value - self.rates.head * gradient for value, gradient in zip(head, gradients, strict=True)]
        return self.classification(weights, head, *held), weights, head

    def stepped(self, patches: Tensor, *, create_graph: bool) -> Weights:
        """E and D after one step down the reconstruction loss (eq. 6)."""
        weights = {name: value.requires_grad_() for name, value in self.weights.items()}
        with torch.set_grad_enabled(create_graph):
            probabilities = self.probabilities(weights, patches)
        loss = self.reconstruction(weights, patches, probabilities)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=create_graph)
        return {
            name: value.detach() - self.rates.encoder * gradient
            for (name, value), gradient in zip(weights.items(), gradients, strict=True)
        }

    def probabilities(self, weights: Weights, patches: Tensor) -> Tensor:
        """[B, N] that each patch is masked."""
        every = torch.arange(patches.shape[1], device=patches.device).expand(len(patches), -1)
        with torch.no_grad():
            embeddings = functional_call(
                self.model, weights, (patches, every, every[:, :0]), {"give": "patch_embedding"}
            )
        probabilities: Tensor = self.network(embeddings)
        return probabilities

    def reconstruction(self, weights: Weights, patches: Tensor, probabilities: Tensor) -> Tensor:
        """Eq. 1, the most probable patches masked, over their number."""
        order = probabilities.argsort(dim=1)
        visible, masked = order[:, : self.visible].sort(1).values, order[:, self.visible :].sort(1).values
        prediction: Tensor = functional_call(self.model, weights, (patches, visible, masked)).prediction
        errors = (prediction - normalised(gather_patches(patches, masked))).square().mean(-1)  # [B, M]
        return (probabilities.gather(1, masked) * errors).mean()

    def classification(self, weights: Weights, head: list[Tensor], patches: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the head on the mean of the patch tokens of whole images."""
        every = torch.arange(patches.shape[1], device=patches.device).expand(len(patches), -1)
        tokens = functional_call(self.model, weights, (patches, every, every[:, :0]), {"give": "features"})
        return F.cross_entropy(F.linear(tokens[:, 1:].mean(1), *head), labels)


def detached(weights: Weights) -> Weights:
    """The same values without a graph."""
    return {name: value.detach() for name, value in weights.items()}
