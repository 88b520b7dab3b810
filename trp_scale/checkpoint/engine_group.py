"""A run's engine and what its hooks hold beside it, as the one engine that a checkpoint knows.

Tensors of a hook's own engine, such as a masking network's, carry that engine's name: "masking_network.hidden.weight".
How many steps it has made, and what else it remembers, is under "masking_network.optimizer_steps" and so on in the
checkpoint's engine_state. A hook's vector that lies like the run's weights, such as their average, is one more state of
the run's own tensors, beside "weight" and the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trp_scale.core.engine import Stores
from trp_scale.core.pieces import Piece, Shards
from trp_scale.errors import CheckpointError

STEPS = "optimizer_steps"


class EngineGroup:
    """Several engines as one; without others, exactly the main one.

    Args:
        main: the run's engine.
        others: by name; names have no dot.
        sharded: the hooks' vectors by name, laid out like the main engine's weights; asked for at each save and load.
    """

    def __init__(
        self, main: Stores, others: Mapping[str, Stores], sharded: Callable[[], Mapping[str, Shards]] = dict
    ) -> None:
        self.main, self.others, self.sharded = main, others, sharded
        self.name, self.zero_stage = main.name, main.zero_stage

    def pieces(self) -> Iterator[Piece]:
        vectors = self.sharded()
        for number, piece in enumerate(self.main.pieces()):
            parts = {name: vector.parts[number] for name, vector in vectors.items()}
            yield replace(piece, tensors={**piece.tensors, **parts})
        for name, engine in self.others.items():
            for piece in engine.pieces():
                yield replace(piece, name=f"{name}.{piece.name}")

    def create_optimizer_state(self) -> None:
        for engine in (self.main, *self.others.values()):
            engine.create_optimizer_state()

    def prepare(self) -> None:
        """Before saving: an engine that has made no step gets the moments that it would start with, since a checkpoint
        has moments of all its tensors or of none."""
        if self.main.optimizer_steps() > 0:
            for engine in self.others.values():
                if engine.optimizer_steps() == 0:
                    engine.create_optimizer_state()

    def optimizer_steps(self) -> int:
        """The main engine's."""
        return self.main.optimizer_steps()

    def after_load(self, optimizer_steps: int) -> None:
        """The others follow in `load_extra_state`, where their own step counts are."""
        self.main.after_load(optimizer_steps)

    def extra_state(self) -> Mapping[str, float]:
        state = dict(self.main.extra_state())
        for name, engine in self.others.items():
            stored = {STEPS: float(engine.optimizer_steps()), **engine.extra_state()}
            state |= {f"{name}.{key}": value for key, value in stored.items()}
        return state

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        self.main.load_extra_state({key: value for key, value in state.items() if "." not in key})
        for name, engine in self.others.items():
            prefix = f"{name}."
            of_engine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            engine.after_load(int(of_engine[STEPS]))
            engine.load_extra_state(of_engine)


def other_engines(engine_state: Mapping[str, float]) -> list[str]:
    """Names of the engines beside the main one in a checkpoint."""
    return sorted(key.removesuffix(f".{STEPS}") for key in engine_state if key.endswith(f".{STEPS}"))


def check_same_engines(directory: Path, stored: Mapping[str, float], present: Mapping[str, float]) -> None:
    """Check that a checkpoint is of a run with the same engines.

    Args:
        stored: engine_state of the checkpoint.
        present: extra_state of what is to be filled.

    Raises:
        CheckpointError: naming each engine that only one of them has.
    """
    in_checkpoint, in_run = other_engines(stored), other_engines(present)
    problems = [
        f"the engine {name} is in the checkpoint and not in this run" for name in in_checkpoint if name not in in_run
    ]
    problems += [
        f"the engine {name} is in this run and not in the checkpoint" for name in in_run if name not in in_checkpoint
    ]
    if problems:
        raise CheckpointError(
            f"{directory}: {'; '.join(problems)}; go on with the settings that the checkpoint's run had"
        )
