"""The masking network: how probable it is that each patch of an image is masked (MLO-MAE 3.2, B.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.models.initialise import write, xavier_uniform_tensor
from trp_scale.models.positions import sine_cosine


class MaskingNetwork(nn.Module):
    """Patch embeddings [B, N, D] -> probabilities [B, N] in (0, 1), fp32 at least.

    Its input is what the encoder's patch embedding gives, without positions and without a graph: the public code lets
    the patch embedding train through it.
    """

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        self.grid = config.crops.size // config.vision.patch_size
        self.width = config.model.hidden_size
        self.hidden_size: int = config.multilevel.hidden_size

    @property
    def layers(self) -> list[nn.Module]:
        """Each a unit of sharding."""
        return [child for child in self.children() if isinstance(child, nn.Linear)]

    def forward(self, embeddings: Tensor) -> Tensor:
        logits = self.logits(embeddings.detach().to(next(self.parameters()).dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()

    def logits(self, embeddings: Tensor) -> Tensor:
        """[B, N, D] -> [B, N]."""
        raise NotImplementedError(f"{type(self).__name__} does not say how patches are scored")

    def initialise(self, seed: int) -> None:
        """Xavier uniform (B.3), biases 0, from the seed and each tensor's name."""

        def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
            if parameter.ndim < 2:
                return 0.0
            return xavier_uniform_tensor(seed, f"masking_network.{name}", tuple(parameter.shape))

        write(self, rule)


class FlattenedMasking(MaskingNetwork):
    """The paper's: two linear layers over the embeddings of all patches at once, a ReLU between them (Table 11)."""

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        patches = self.grid**2
        self.hidden = nn.Linear(patches * self.width, self.hidden_size)
        self.score = nn.Linear(self.hidden_size, patches)
        self.initialise(config.training.seed)

    def logits(self, embeddings: Tensor) -> Tensor:
        return self.score(self.hidden(embeddings.flatten(1)).relu())  # type: ignore[no-any-return]


class PatchwiseMasking(MaskingNetwork):
    """Ours, small: the same two layers for each patch, which sees its own embedding with its position, and the mean
    over the image. 787,457 weights at D = 768 and 512 between the layers."""

    positions: Tensor

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        self.hidden = nn.Linear(self.width, self.hidden_size)
        self.context = nn.Linear(self.width, self.hidden_size, bias=False)
        self.score = nn.Linear(self.hidden_size, 1)
        self.register_buffer("positions", sine_cosine(self.grid, self.width).float(), persistent=False)
        self.initialise(config.training.seed)

    def logits(self, embeddings: Tensor) -> Tensor:
        hidden = self.hidden(embeddings + self.positions.to(embeddings.dtype))  # [B, N, H]
        context = self.context(embeddings.mean(1, keepdim=True))  # [B, 1, H]
        return self.score((hidden + context).relu()).squeeze(-1)  # type: ignore[no-any-return]


NETWORKS: dict[str, type[MaskingNetwork]] = {"flattened": FlattenedMasking, "patchwise": PatchwiseMasking}
"""By multilevel.network."""
