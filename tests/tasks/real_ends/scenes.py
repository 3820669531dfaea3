"""Ends of a trainer that speaks: each scene is played in a process of its own, forked when torch is imported once.

Run as `python -m tests.tasks.real_ends.scenes FOLDER SCENE…`. A scene raises what a real cause makes real code raise;
the trainer reports the exception to the parent through its own channel. Left behind for each scene: its events, its
stderr, and its exit code.
"""

import errno
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.training import TrainingConfig
from cairn.model.data.sample_order import SampleOrder
from cairn.model.data.token_windows import TokenWindows
from cairn.model.errors import BadBatch, LossExploded, NonFiniteLoss
from cairn.model.training.train_state import TrainState
from cairn.model.training.training_step import StepInputs, find_bad_windows, find_spike, take_step
from cairn.storage.checkpoints.checkpoint import load_checkpoint
from cairn.storage.snapshots.data_snapshot import open_snapshot, publish_snapshot
from cairn.storage.stores.codec import sha256
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.trainer_channel import ParentChannel, exit_on_error
from cairn.tasks.trainer.trainer_protocol import Ready
from tests.flipped_bit import flip_file, flip_object
from tests.storage.builders import run_with_commits
from tests.storage.staged_snapshot import manifest_of, stage_snapshot
from tests.tasks.trainer_in_process import TrainingWorld

Scene = Callable[[Path], None]
VOCAB, BLOCK, RARE = 61, 8, 60
MORE_THAN_THERE_IS = 8 << 30


def limit_address_space() -> None:
    """Leave room for a little more than there is already."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)


def cpu_allocator(size: int, folder: Path) -> None:
    limit_address_space()
    torch.empty(size, dtype=torch.uint8)


def python_allocator(folder: Path) -> None:
    limit_address_space()
    bytearray(MORE_THAN_THERE_IS)


def array_allocator(folder: Path) -> None:
    limit_address_space()
    np.empty(MORE_THAN_THERE_IS, dtype=np.uint8)


def cuda_allocator(folder: Path) -> None:
    torch.empty(1 << 44, dtype=torch.uint8, device="cuda")


def missing_module(folder: Path) -> None:
    import no_such_module  # noqa: F401


def missing_name(folder: Path) -> None:
    from cairn.storage.stores.codec import no_such_name  # noqa: F401


def snapshot(folder: Path, *, shards_for: str = "{}") -> tuple[LocalStore, str]:
    """Publish a small snapshot whose shards name the tokenizer `shards_for`."""
    folder.mkdir(parents=True)
    store, manifest = LocalStore(folder / "store"), manifest_of(train=50, val=10)
    staged = stage_snapshot(folder / "staged", replace(manifest, tokenizer_sha256=sha256(shards_for.encode())))
    return store, publish_snapshot(store, staged, manifest)[0]


def flipped_byte(folder: Path) -> None:
    store, snapshot_id = snapshot(folder)
    flip_object(store, f"data/{snapshot_id}/train-00000.arrow")
    open_snapshot(store, snapshot_id, folder / "cache")


def foreign_shard(folder: Path) -> None:
    store, snapshot_id = snapshot(folder, shards_for="another tokenizer")
    open_snapshot(store, snapshot_id, folder / "cache")


def flipped_byte_after_verification(folder: Path) -> None:
    store, snapshot_id = snapshot(folder)
    tokens = open_snapshot(store, snapshot_id, folder / "cache").train[0].tokens().copy()
    tokens.view(np.uint8)[2 * 20 + 1] ^= 1
    TokenWindows([tokens], BLOCK, VOCAB).gather(np.arange(6))


class TinyRun:
    """A one-layer model on random tokens, in which `RARE` occurs in the chosen windows only."""

    def __init__(self, rare_in: tuple[int, ...] = ()) -> None:
        torch.set_num_threads(1)
        tokens = np.random.default_rng(1).integers(0, RARE, 40 * BLOCK + 1).astype(np.uint16)
        tokens[[window * BLOCK + 3 for window in rare_in]] = RARE
        self.training = TrainingConfig(
            steps=200, global_batch=40, micro_batch=40, warmup_steps=1, lr=1e-3, precision="fp32", kernels="fused"
        )
        config = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=BLOCK)
        self.windows = TokenWindows([tokens], BLOCK, VOCAB)
        self.order = SampleOrder(window_count=40, seed=1, global_batch=40)
        self.state = TrainState.create(config, self.training, VOCAB, torch.device("cpu"))

    def step(self) -> float:
        inputs = StepInputs(windows=self.windows, order=self.order, training=self.training, micro_batch=40)
        return take_step(self.state, inputs).loss

    @property
    def embedding(self) -> torch.nn.Embedding:
        return next(module for module in self.state.model.modules() if isinstance(module, torch.nn.Embedding))


def poisoned_batch(rare_in: tuple[int, ...], folder: Path) -> None:
    run = TinyRun(rare_in)
    poison_inputs(run)
    try:
        run.step()
    except NonFiniteLoss as error:
        drawn = run.order.windows_of(0)
        guilty = find_bad_windows(run.state, run.windows, drawn, training=run.training)
        raise BadBatch(step=error.step, windows=guilty, why=str(error)) from error


def poison_inputs(run: TinyRun) -> None:
    """Make the embedding of `RARE` not a number wherever it is looked up, and nowhere else."""

    def spoil(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.where((inputs[0] == RARE).unsqueeze(-1), float("nan"), output)

    run.embedding.register_forward_hook(spoil)


def broken_weights(folder: Path) -> None:
    run = TinyRun()
    with torch.no_grad():
        run.embedding.weight.fill_(float("nan"))
    run.step()


def exploded_loss(folder: Path) -> None:
    run = TinyRun()
    losses = [run.step() for _ in range(64)]
    with torch.no_grad():
        run.embedding.weight.mul_(500)
    losses += [run.step() for _ in range(4)]
    spike = find_spike(losses, patience=4, rise=1.5)
    assert spike is not None, losses
    raise LossExploded(step=68, spike_step=65, level=spike[0], baseline=spike[1], windows=(1, 2))


def no_permission(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    if os.geteuid() == 0:  # modes bind nobody who is root
        os.seteuid(65534)
    LocalStore(folder / "store").write("runs/a", b"1")


def spoiled_checkpoint(spoil: Callable[[Path], object], name: str, folder: Path) -> None:
    store = LocalStore(folder / "store")
    committed = run_with_commits(store, 5).state.checkpoints[-1].committed
    path = store.local_path(f"{committed.prefix}/{name}")
    assert path is not None
    spoil(path)
    load_checkpoint(store, committed.reference)


def not_durable(folder: Path) -> None:
    store = LocalStore(folder / "store")
    store.write("runs/there", b"")
    fsync = os.fsync

    def fails(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    os.fsync = fails  # its own process ends with it
    store.create("runs/a", b"1")


def missing_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    world = TrainingWorld(folder)
    path = world.store.local_path(f"data/{world.snapshot_id}/snapshot.json")
    assert path is not None
    path.unlink()
    with world.opened(world.spec()):
        pass


def closed_port(folder: Path) -> None:
    from cairn.storage.stores.s3_bucket import S3Bucket
    from cairn.storage.stores.s3_store import S3Store

    os.environ.update(
        AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1"
    )
    S3Store(S3Bucket("bucket")).write("runs/a", b"1")


def store_is_no_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "file").touch()
    LocalStore(folder / "file" / "store").write("runs/a", b"1")


def full_disk(mounted: str, folder: Path) -> None:
    LocalStore(Path(mounted)).write("runs/a", bytes(4 << 20))


def full_spool(folder: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as spool:
        spool.write(b"a step")


def orphaned(folder: Path) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    channel = ParentChannel()
    os.close(1)
    os.close(reading)
    channel.send(Ready(step=0, state_sha256=None, parameters=1, device="cpu"))


SCENES: dict[str, Scene] = {
    "cpu-allocator": partial(cpu_allocator, MORE_THAN_THERE_IS),
    "cpu-allocator-again": partial(cpu_allocator, 2 * MORE_THAN_THERE_IS),
    "python-allocator": python_allocator,
    "array-allocator": array_allocator,
    "missing-module": missing_module,
    "missing-name": missing_name,
    "flipped-byte": flipped_byte,
    "foreign-shard": foreign_shard,
    "flipped-byte-after-verification": flipped_byte_after_verification,
    "poisoned-batch": partial(poisoned_batch, (3, 17)),
    "poisoned-batch-again": partial(poisoned_batch, (3, 17)),
    "another-poisoned-batch": partial(poisoned_batch, (5,)),
    "broken-weights": broken_weights,
    "exploded-loss": exploded_loss,
    "no-permission": no_permission,
    "damaged-checkpoint": partial(spoiled_checkpoint, flip_file, "trainer.json"),
    "missing-checkpoint": partial(spoiled_checkpoint, Path.unlink, "manifest.json"),
    "not-durable": not_durable,
    "missing-data": missing_data,
    "closed-port": closed_port,
    "store-is-no-folder": store_is_no_folder,
    "full-spool": full_spool,
    "orphaned": orphaned,
}
ON_REQUEST: dict[str, Scene] = {"cuda-allocator": cuda_allocator}


def play(scene: Scene, folder: Path) -> None:
    """Play the scene as a trainer would live through it, in this process; never returns."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), number)
    channel = ParentChannel()
    try:
        scene(folder)
    except Exception as error:
        exit_on_error(channel, error)
    os._exit(0)


def main() -> None:
    """Play the named scenes, one after the other."""
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        kind, _, argument = name.partition("=")
        scene = partial(full_disk, argument) if kind == "full-disk" else (SCENES | ON_REQUEST)[kind]
        child = os.fork()
        if child == 0:
            play(scene, folder / kind)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / f"{kind}.exit").write_text(str(code))


if __name__ == "__main__":
    main()
