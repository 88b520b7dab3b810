"""FLOPs against counted multiply-adds and published figures; device peaks; memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForPreTraining

from benchmarks.text_steps import random_batch
from tests.runs import flags
from tests.unit.finetuning.dense.test_model import CASES, built, images
from trp_scale.config import TextModelConfig
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import Batch
from trp_scale.data.text.dataset import GROUPS
from trp_scale.distributed.environment import Environment
from trp_scale.models.flops import bert_step_flops, encoder_forward_flops, forward_flops, peak_flops, peak_memory_bytes
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import TextUpstream


@pytest.mark.parametrize(
    ("length", "predicted", "train_gigaflops"),
    [(128, 128, 85.5), (128, 19, 69.8), (512, 77, 301.0)],
    ids=["128, all positions", "128, masked positions", "512, masked positions"],
)
def test_bert_base(length: int, predicted: int, train_gigaflops: float) -> None:
    """BERT-base with 30522 pieces, forward x 3: 28.5, 23.3 and 100.3 GFLOP forward."""
    flops = bert_step_flops(TextModelConfig(), rows=1, length=length, predicted=predicted, vocabulary=30522)
    assert flops / 1e9 == pytest.approx(train_gigaflops, rel=0.01)


def test_forward_agrees_with_what_torch_counts() -> None:
    """Any feed-forward width, and all positions to the vocabulary, as transformers' BERT computes them."""
    model = TextModelConfig(layers=2, hidden_size=64, heads=4, intermediate_size=160, max_positions=48)
    peer = BertForPreTraining(
        BertConfig(
            vocab_size=320,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=160,
            max_position_embeddings=48,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        peer(torch.ones(3, 48, dtype=torch.long))
    ours = bert_step_flops(model, rows=3, length=48, predicted=48, vocabulary=320)
    assert ours / 3 == pytest.approx(counter.get_total_flops(), rel=1e-3)


def small_model(layers: int) -> TextModelConfig:
    return TextModelConfig(layers=layers, hidden_size=64, heads=4, intermediate_size=160, max_positions=48, dropout=0.0)


def small_batch() -> Batch:
    """3 rows of 48 pieces, 7 of them masked, out of 320."""
    batch = random_batch(3, 48, 7)
    batch.fields["tokens"] %= 320
    batch.fields["labels"] %= 320
    return batch


def counted_forward(model: TextModelConfig, batch: Batch) -> int:
    """Counted by torch while it computes."""
    module = BertForMaskedPositions(model, vocab_size=320, seed=0).eval()
    objective = PosMaskedLanguageModelling(PosBertObjectiveConfig(), GROUPS, 64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(module, batch)
    return int(counter.get_total_flops())


def test_forward_of_our_model_is_counted_as_it_is_computed() -> None:
    """The last layer at the first and the masked positions alone, which a whole one would overstate."""
    model, batch = small_model(layers=2), small_batch()
    sizes = {"rows": 3, "length": 48, "predicted": 7, "vocabulary": 320}
    counted = 3 * counted_forward(model, batch)
    assert bert_step_flops(model, **sizes, read=1 + 7) == pytest.approx(counted, rel=1e-3)
    assert bert_step_flops(model, **sizes) > 1.2 * counted


def test_what_is_left_out_is_not_counted() -> None:
    """Attention goes over whole rows; all else over the places that are kept."""
    model, batch = small_model(layers=3), small_batch()
    real = torch.arange(48) < torch.tensor([[48], [40], [41]])
    batch.fields["attention_mask"], batch.fields["masked_positions"] = real, batch["masked_positions"] % 40
    batch.fields["kept"] = real.flatten().nonzero().flatten()
    sizes = {"rows": 3, "length": 48, "predicted": 7, "vocabulary": 320, "read": 1 + 7}
    found = bert_step_flops(model, **sizes, kept=129 / 144)
    assert found == pytest.approx(3 * counted_forward(model, batch), rel=1e-3)
    assert found < 0.97 * bert_step_flops(model, **sizes)


def test_a_run_over_text_counts_as_much_padding_as_its_first_rows_have(text_dataset: Path, tmp_path: Path) -> None:
    config = parse(flags(text_dataset, tmp_path)).config
    assert isinstance(config, PosBertConfig)
    task = TextUpstream(config, Environment())
    batch, sizes = task.source.first_rows(min(2048, task.source.rows)), {"length": task.meta.length, "rows": 8}
    share = float(batch["attention_mask"].float().mean())
    assert config.batch.global_size == 8 and share < 0.97

    def counted(kept: float) -> float:
        vocabulary, limit = task.meta.vocab_size, task.sources.limit
        return bert_step_flops(config.model, **sizes, predicted=limit, vocabulary=vocabulary, read=1 + limit, kept=kept)

    # The list is filled up to the next 64th of all places.
    assert counted(share) <= task.step_flops <= counted(share + 1 / 64) < counted(1.0)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks(name: str, teraflops: float) -> None:
    assert peak_flops(name, "bf16") == teraflops * 1e12


@pytest.mark.parametrize(("name", "precision"), [("cpu", "bf16"), ("NVIDIA A10G", "bf16"), ("NVIDIA H200", "fp32")])
def test_unknown_peaks(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory_bytes(on_gpu=False)
    block = torch.ones(before // 8 + 2**25)  # fp32: half of what was used so far, and 128 MiB
    assert peak_memory_bytes(on_gpu=False) > before + 2**26
    assert block.sum() == len(block)


@pytest.mark.parametrize("head", CASES)
def test_shapes_alone_give_what_the_pass_gives(head: str) -> None:
    model = built(head)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images())
    assert forward_flops(model, images()) == counter.get_total_flops() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not next(iter(model.parameters())).is_meta


def test_encoder_and_linear_head_are_what_the_formula_says() -> None:
    config = ImageTaskConfig()
    model = built("linear")
    config.model = replace(config.model, layers=4, hidden_size=32, heads=2, intermediate_size=64)
    config.crops.size, config.vision.patch_size = 32, 8
    head = 2 * (32 // 8) ** 2 * 32 * 5
    assert forward_flops(model, images(rows=1)) == encoder_forward_flops(config) + head
