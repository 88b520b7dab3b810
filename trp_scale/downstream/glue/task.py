"""GLUE: sentences and pairs of sentences (TRP 001, Tables 1 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from torch import Tensor, nn

from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import start_worker_server
from trp_scale.data.mixture import MemberPath
from trp_scale.data.rows import Rows
from trp_scale.data.text.tokenizer import save_given
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.downstream.encoder_source import EncoderSource, open_encoder
from trp_scale.downstream.glue.batch import GlueBatchBuilder, PairTokenizer, TokenTable, load_tokenizer, tokenize
from trp_scale.downstream.glue.examples import FORMATS
from trp_scale.downstream.glue.folders import read_glue
from trp_scale.downstream.glue.metrics import FIGURES, GlueMetrics, figure_name, require_libraries
from trp_scale.downstream.glue.model import BertClassifier, SentenceClassification
from trp_scale.downstream.glue.settings import GlueTaskConfig
from trp_scale.downstream.task import TaskParts, open_task_sources, take_encoder
from trp_scale.observe.throughput import bert_step_flops
from trp_scale.upstreams.pos_bert.model import padded_vocabulary


class GlueTask(TaskParts[GlueTaskConfig]):
    """One task of GLUE; see `DownstreamTask`."""

    def __init__(self, config: GlueTaskConfig, environment: Environment) -> None:
        require_libraries()
        if config.data.workers > 0:
            start_worker_server(GlueBatchBuilder.__module__)
        downstream, root = config.downstream, Path(config.data.path)
        self.name = downstream.task
        form = FORMATS[self.name]
        downstream.classes = form.outputs
        self._encoder = open_encoder(config.model.weights) if config.model.weights else None
        self._tokenizer_directory = tokenizer_directory(config, self._encoder)
        self._tokenizer = load_tokenizer(self._tokenizer_directory, length=downstream.max_length)
        data = read_glue(root, self.name, split=downstream.split, allowed_bad=config.data.max_corrupt_blocks)
        train = tokenize(data.train, self._tokenizer)
        self._sets = list(data.measured)
        measured = [tokenize(examples, self._tokenizer) for examples in data.measured.values()]
        self.metric = figure_name(next(iter(FIGURES[self.name])), self._sets[0])
        super().__init__(
            config,
            open_task_sources(
                config,
                environment,
                glue_rows(config, self._tokenizer, [train]),
                glue_rows(config, self._tokenizer, measured),
                train_paths=[MemberPath(name="", weight=Fraction(1), path=root)],
                measured_paths=[MemberPath(name=name, weight=Fraction(1), path=root) for name in self._sets],
            ),
        )
        self.sources.notices += data.notices
        self.objective = SentenceClassification(self.name, form.outputs)
        # Rows that share sequences leave little padding: the mean of their pieces.
        length = downstream.max_length if downstream.padding == "length" else round(float(train.lengths.mean()))
        self.positions_per_step = config.batch.global_size * length
        self.step_flops = bert_step_flops(
            config.model, rows=config.batch.global_size, length=length, predicted=0, vocabulary=0
        )

    def model(self) -> nn.Module:
        """With a head from the seed, and the pooler too where the encoder comes without one."""
        if self._encoder is None:
            return BertClassifier(self.config, vocabulary=padded_vocabulary(self._tokenizer.vocabulary))
        weights = self._encoder.read()
        rows = len(weights["embeddings.word_embeddings.weight"])
        if rows < self._tokenizer.vocabulary:
            raise RefusedError(
                f"--from {self._encoder.path}: embeddings of {rows} pieces, but the tokenizer "
                f"{self._tokenizer_directory} has {self._tokenizer.vocabulary}; give the encoder's own"
            )
        model = BertClassifier(self.config, vocabulary=rows)
        if not any(name.startswith("pooler.") for name in weights):
            weights |= {f"pooler.{name}": value.detach() for name, value in model.bert.pooler.named_parameters()}
        take_encoder(model.bert, weights, self._encoder.path)
        return model

    def leave(self, run_dir: Path, world: Group) -> None:
        """Copy the tokenizer, so that the run can be fine-tuned again on another task."""
        if world.rank == 0 and not (run_dir / TOKENIZER).exists():
            save_given(self._tokenizer_directory, run_dir / TOKENIZER)

    @classmethod
    def measure_on(cls, config: GlueTaskConfig, checkpoint: Path, data: str, images: str) -> None:
        """The run's own checkpoint also brings the tokenizer that it was trained with."""
        super().measure_on(config, checkpoint, data, images)
        config.model.weights, config.downstream.tokenizer = str(checkpoint), ""

    def predict(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C] logits, or one score for each row."""
        return self.objective.logits(forward, batch)

    def metrics(self) -> GlueMetrics:
        return GlueMetrics(self.name, self._sets)


def glue_rows(config: GlueTaskConfig, tokenizer: PairTokenizer, tables: list[TokenTable]) -> Rows:
    """Tables of examples as what sources are made of."""
    downstream = config.downstream
    builder = GlueBatchBuilder(
        tables,
        tokenizer,
        length=downstream.max_length,
        padding=downstream.padding,
        scores=downstream.classes == 1,
    )
    return Rows(blocks=tables, meta=None, limit=0, builder=builder, digests=[table.digest() for table in tables])


def tokenizer_directory(config: GlueTaskConfig, encoder: EncoderSource | None) -> Path:
    """--downstream.tokenizer, else the encoder's own.

    Raises:
        RefusedError: there is neither.
    """
    if config.downstream.tokenizer:
        return Path(config.downstream.tokenizer)
    if encoder is None or encoder.tokenizer is None:
        raise RefusedError(
            "--from scratch brings no tokenizer; give --downstream.tokenizer DIR, for example that of a sharded data "
            "set (DATASET/tokenizer)"
        )
    return encoder.tokenizer
