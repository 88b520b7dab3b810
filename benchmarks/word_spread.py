"""How far the outputs of each layer of a BERT differ from word to word: near 0, the encoder tells no words apart.

    python benchmarks/word_spread.py --encoders RUN RUN ... --data GLUE

Sentences are those of SST-2's development set. The figure is the standard deviation over all pieces of all sentences,
averaged over the layer's width. A layer norm ends each layer, so that it is about 1 at most.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer, BertModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.finetuning.encoder_source import open_encoder
from trp_scale.finetuning.glue.folders import read_glue
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.pretraining.pos_bert.model import bert_config


@dataclass(kw_only=True)
class Options:
    """Which encoders."""

    encoders: list[str]
    """Each as --from of trp-scale finetune."""
    data: Path
    """The GLUE directory."""
    sentences: int = 256
    """How many to encode."""


def spread(path: str, sentences: list[str]) -> list[float]:
    """Of the embeddings, then of each layer."""
    source, config = open_encoder(path), GlueTaskConfig()
    source.adopt(config)
    weights = source.read()
    vocabulary = len(weights["embeddings.word_embeddings.weight"])
    model = BertModel(bert_config(config.model, vocabulary)).eval()
    model.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(str(source.tokenizer), local_files_only=True, trust_remote_code=False)
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states  # [R, L, D] each
    real = batch["attention_mask"].bool()
    return [float(state[real].std(dim=0).mean()) for state in states]


def main(options: Options) -> None:
    rows = next(iter(read_glue(options.data, "sst2", split="dev", allowed_bad=0).measured.values()))
    sentences = rows.sentences[0][: options.sentences]
    for path in options.encoders:
        print(path, *(f"{value:.3f}" for value in spread(path, sentences)))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__, use_underscores=True))
