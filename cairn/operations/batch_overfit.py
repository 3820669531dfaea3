"""`cairn train --overfit-one-batch`: can this network, at this learning rate, learn a few windows by heart?

Text, tokenizer, network, numerics and optimizer are the run's own; the store is only read. Source: Karpathy 2019,
"A Recipe for Training Neural Networks".
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.model.errors import NonFiniteLoss
from cairn.storage.logs.run_log import RunLog
from cairn.storage.stores.local_store import LocalStore
from cairn.storage.stores.object_store import ObjectStore
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data.snapshot_lookup import find_by_id
from cairn.tasks.machine.placement import resolve_threads
from cairn.tasks.trainer.trainer_protocol import TrainerSpec

if TYPE_CHECKING:
    from cairn.model.training.training_loop import StepResult

BY_HEART = 0.1  # nats a token: far below what any text allows a network that has not seen it
WINDOWS, STEPS, WARMUP_STEPS = 4, 1000, 10
_TEXT_BYTES, _BYTES_OF_ID = 4 << 20, 400


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOverfit:
    """Whether one batch was learned by heart, and why; losses are in nats per token, `losses` one for each step."""

    sound: bool
    why: str
    windows: int
    tokens: int
    parameters: int
    lr: float
    precision: str
    device: str
    losses: tuple[float, ...]


def overfit_one_batch(config: RunConfig, log: RunLog, base_dir: Path, say: Callable[[str], None]) -> BatchOverfit:
    """Train on one batch until it is known by heart, at most `STEPS` steps; `config` has its numerics chosen."""
    from cairn.model.data.sample_order import Component, SampleOrder
    from cairn.model.training.determinism import make_deterministic, resolve_device
    from cairn.model.training.training_loop import StepObserver, train_until
    from cairn.tasks.trainer.trainer_channel import Place
    from cairn.tasks.trainer.training_setup import fresh_state, open_training_data

    problem, steps = "", list["StepResult"]()

    def follow(result: "StepResult") -> None:
        steps.append(result)
        if result.step % 25 == 1:
            say(f"step {result.step} · loss {result.train_loss:.3f}")

    with tempfile.TemporaryDirectory(prefix="cairn-overfit-") as name:
        store, snapshot_id = _find_text(config, log, base_dir, Path(name))
        place, threads = Place(device=resolve_device(config.training.device)), resolve_threads(config.training.threads)
        make_deterministic(seed=config.training.seed, threads=threads)
        spec = _spec(config, store, snapshot_id, Path(name), threads)
        data = open_training_data(store, spec, place)
        assert data.inputs.loader is not None
        data.inputs.loader.close()
        count = data.inputs.windows.window_count
        few = (Component(first_window=0, window_count=min(WINDOWS, count)),)  # every epoch of them is this one batch
        order = SampleOrder(window_count=count, seed=spec.training.seed, global_batch=WINDOWS, components=few)
        state = fresh_state(spec, data, place)
        observer = StepObserver(on_step=follow, stop_requested=lambda: bool(steps) and steps[-1].train_loss < BY_HEART)
        try:
            train_until(state, replace(data.inputs, order=order, loader=None), observer, until_step=STEPS)
        except NonFiniteLoss as error:
            problem = str(error)
    losses = tuple(step.train_loss for step in steps)
    sound, why = judge_losses(losses, problem, lr=config.training.lr)
    return BatchOverfit(
        sound=sound,
        why=why,
        windows=few[0].window_count,
        tokens=few[0].window_count * config.model.block_size,
        parameters=state.model.parameter_count,
        lr=config.training.lr,
        precision=config.training.precision,
        device=str(place.device),
        losses=losses,
    )


def _find_text(config: RunConfig, log: RunLog, base_dir: Path, folder: Path) -> tuple[ObjectStore, str]:
    """Return store and snapshot of the run, or of the beginning of its text in a store of its own."""
    if log.state.opened is not None:
        return log.store, log.state.opened.data_snapshot
    if config.data.snapshot:
        return log.store, find_by_id(log.store, config.data.snapshot).snapshot_id
    from cairn.tasks.data.corpus import preview_corpus
    from cairn.tasks.data.snapshot_build import build_snapshot

    store, beginning = LocalStore(folder / "store"), folder / "beginning.txt"
    wanted = max(_TEXT_BYTES, _BYTES_OF_ID * (config.data.bpe_vocab_size or 0), 64 * WINDOWS * config.model.block_size)
    documents = chain.from_iterable(source.documents() for source in preview_corpus(config.data, base_dir))
    with beginning.open("w", encoding="utf-8") as file:
        for document in documents:  # until there is text enough for the windows and the tokenizer
            file.write(f"{document.text}\n")
            if (wanted := wanted - document.bytes) <= 0:
                break
    data = config.data.model_copy(update={"sources": (str(beginning),), "weights": (), "split": "end"})
    return store, build_snapshot(store, data, base_dir).snapshot_id


def _spec(config: RunConfig, store: ObjectStore, snapshot_id: str, folder: Path, threads: int) -> TrainerSpec:
    """Return the spec of a trainer of few windows, at the full rate all along and without dropout."""
    few = {"steps": STEPS, "global_batch": WINDOWS, "micro_batch": WINDOWS, "probe_every_steps": 0}
    steady = {"warmup_steps": WARMUP_STEPS, "min_lr": config.training.lr}
    return TrainerSpec(
        run_id="overfit-one-batch",
        attempt=1,
        store_url=store.url,
        snapshot_id=snapshot_id,
        data=config.data.model_copy(update={"weights": ()}),
        model=config.model.model_copy(update={"dropout": 0.0}),
        training=config.training.model_copy(update={**few, **steady}),
        micro_batch=WINDOWS,
        activation_checkpointing=config.training.activation_checkpointing,
        quarantined=(),
        divergence=config.divergence,
        resume=None,
        patience_seconds=config.checkpoint.patience_seconds,
        threads=threads,
        cache_dir=folder / "snapshots",
        work_dir=folder / "work",
    )


def judge_losses(losses: Sequence[float], problem: str, *, lr: float) -> tuple[bool, str]:
    """Return whether the batch was learned, and why; `problem` says why there are no more losses, empty for none."""
    lower = f"lower training.lr (now {lr:g})"
    if problem:
        return False, f"{problem}: {lower}, or try training.precision = fp32"
    course = f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    if losses[-1] < BY_HEART:
        return True, f"{course}: text, network and optimizer fit together, and the batch is known by heart"
    if losses[-1] > losses[0] or min(losses) < losses[-1] / 2:
        return False, f"{course} and was {min(losses):.3f} in between: it jumps; {lower}"
    why = f"raise training.lr (now {lr:g}) or make the network larger"
    return False, f"{course}, and {BY_HEART:g} is by heart: too slow or too small; {why}"
