"""Refuses a run that cannot work: configuration, drift, store, text, tokenizer, sizes, memory, room in the store.

A text too small for every tokenizer is refused here, tokenizing checks exactly. Memory and room are estimates.
"""

import math
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from cairn.flows.preparation.training_request import ResolvedRequest, configure_run
from cairn.model.configuration.data import SMALLEST_BPE_VOCABULARY, DataConfig
from cairn.model.configuration.training import TrainingConfig, adapter_table
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.estimates import numerics, size_estimate
from cairn.reports.exporters.exporters import check_exporters
from cairn.storage.errors import StoreRefused, StoreUnavailable, restated
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.snapshots.snapshot_manifest import SPLITS, RejectedRow
from cairn.storage.stores import object_store, store_probe
from cairn.tasks.attempt import attempt_entries, injected_faults
from cairn.tasks.configuration import network_module, stored_configuration
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.data import corpus, document, snapshot_build, snapshot_lookup
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.machine import machine_speed, placement, process_memory
from cairn.tasks.policy.attempt_sizes import MARGIN, AttemptSizes, MemoryRoom, most_workers, next_sizes
from cairn.tasks.text.format import format_quantity
from cairn.tasks.trainer.initial_weights import InitialDirectory, check_directory
from cairn.tasks.trainer.trainer_group import TrainerGroup, trainer_group

_SMALL_BYTES = 16 * 1024 * 1024
"""More text takes longer to tokenize than Prefect takes to import, and the run's step shows how far it is."""
_BESIDE_KEPT = 2
"""One checkpoint on its way, and one that is superseded and not yet deleted."""
_LATE = 2
"""One that is evaluated, and one that waits for that; with less room, a full store waits for the evaluator."""


def check_before_start(
    resolved: ResolvedRequest, log: RunLog, environment: Mapping[str, str], *, writes: bool = True, is_here: bool = True
) -> RunConfig:
    """Read the log, return the run's configuration or raise a command's error.

    `writes` probes a new store; the device of a plan for another machine need not be here.
    """
    try:
        opened = log.refresh_whole().opened
    except StoreUnavailable as error:
        raise type(error)(f"store {log.store.url}: cannot be read: {error}; name another with --store") from error
    attempt_entries.refuse_deleted(log.state)
    wanted = configure_run(resolved, log.state, environment)
    if opened is not None:
        stored_configuration.check_drift(opened.config, wanted, run_id=log.run_id)
    if wanted.model.module and not wanted.code.files:
        files = network_module.read_files(log.store, wanted.model, wanted.code.allow)
        wanted = wanted.model_copy(update={"code": wanted.code.with_files(files)})
    try:
        injected_faults.parse_faults(environment.get("CAIRN_FAULTS", ""))
        if is_here:
            machine_speed.require_device(wanted.training.device)
        group = trainer_group(wanted.training, environment, spares=wanted.machines.spares)
        on_cpu = not machine_speed.trains_on_cuda(wanted.training.device)
        sizes = next_sizes(log.state, wanted.training, wanted.model.block_size, processes=group.size, on_cpu=on_cpu)
    except TaskError as error:
        raise InvalidConfiguration(str(error)) from error
    check_exporters(wanted.exporters)
    if opened is not None:
        if not writes or log.state.finished is not None or log.state.open_attempt is not None:  # its owner may live
            return wanted
        vocab_size = read_manifest(log.store, opened.data_snapshot).vocab_size
    elif writes:
        rule = "a folder or bucket this user may write to, chosen with --store or CAIRN_STORE"
        # One that is unavailable or full for now may work in a minute.
        with restated(StoreRefused, InvalidConfiguration, f"store {log.store.url}: cannot be written", rule=rule):
            store_probe.probe_store(log.store)
        vocab_size = _check_data(log.store, wanted, resolved.base_dir)
    else:  # no more than that: a probe of everything would make the store
        store_probe.require_links(log.store)
        _check_data(log.store, wanted, resolved.base_dir)
        return wanted
    is_known_to_fit = log.state.attempts and (not on_cpu or wanted.model.module)  # asking a device takes torch
    if wanted.training.memory_check and not is_known_to_fit:
        require_memory(wanted, vocab_size, sizes, available_memory(wanted.training, group))
    if opened is None:
        require_room(log.store, store_room(log.store, log.state, wanted, vocab_size))
    return wanted


@contextmanager
def preparing_text(
    resolved: ResolvedRequest, config: RunConfig, log: RunLog, ask: Callable[[], numerics.MachineSpeed | None]
) -> Iterator[None]:
    """Tokenize a new run's small text and measure its numerics in a thread while the block imports modules.

    The run's own steps then find both; what fails here fails there again, and is reported there. The text is read
    before the block: Python would read and import by turns, but imports run beside the tokenizer, which is no Python.
    """
    folder = placement.work_folder(os.environ)

    def prepare() -> None:
        with suppress(Exception):
            snapshot_build.build_snapshot(log.store, config.data, resolved.base_dir, cache_dir=folder)
            machine_speed.numerics_here(config.training, config.model, folder, ask=ask)

    thread = threading.Thread(target=prepare, name="text", daemon=True)
    if log.state.opened is None and not config.data.snapshot:
        with suppress(Exception):
            sources = corpus.preview_corpus(config.data, resolved.base_dir)
            if sum(source.bytes for source in sources) <= _SMALL_BYTES:
                for source in sources:
                    deque(source.documents(), maxlen=0)
                thread.start()
    yield
    if thread.ident is not None:
        thread.join()


def wanted_vocab_size(data: DataConfig, given: Tokenizer | None) -> int:
    """Return how many ids the tokenizer that the configuration asks for has; `given` is one that is not learned."""
    return given.vocab_size if given else data.bpe_vocab_size or SMALLEST_BPE_VOCABULARY


def _check_data(store: object_store.ObjectStore, config: RunConfig, base_dir: Path) -> int:
    """Check a new run's data and initial weights; returns the vocabulary size."""
    if config.data.snapshot:
        manifest = snapshot_lookup.find_by_id(store, config.data.snapshot).manifest
        snapshot_lookup.check_block_size(manifest, config.model, config.data, config.training)
        vocab_size = manifest.vocab_size
    else:
        vocab_size = wanted_vocab_size(config.data, snapshot_build.given_tokenizer(config.data, base_dir))
        if config.data.tokenizer.endswith(".json"):
            corpus.preview_corpus(config.data, base_dir)
        else:  # a token of our own byte-level tokenizers is known to hold at least a byte
            _check_sizes(config, base_dir)
    config.model.rows(vocab_size)
    if (lora := config.training.lora) is not None:
        if config.training.init_from is None:
            raise InvalidConfiguration("training.lora: adapters need weights to be beside; add training.init_from")
        adapter_table(config.model, lora.targets)
    if config.training.init_from is not None:
        check_directory(InitialDirectory(config.training.init_from, base_dir), config.model, vocab_size)
    return vocab_size


def _check_sizes(config: RunConfig, base_dir: Path) -> None:
    """Read the text only until no split, and no weighted source, can be too small; raises `InvalidCorpus`."""
    sources, data, window = corpus.preview_corpus(config.data, base_dir), config.data, config.model.block_size + 1
    vocabulary = data.bpe_vocab_size or SMALLEST_BPE_VOCABULARY
    needed = {"train": max(window, vocabulary - SMALLEST_BPE_VOCABULARY), "val": window}  # a merge needs a byte
    tokens, documents = dict.fromkeys(SPLITS, 0), Counter[str]()
    train_tokens_of = Counter[str]()

    def is_enough(group: str = "") -> bool:
        is_group_enough = not group or train_tokens_of[group] >= window
        return is_group_enough and all(tokens[split] >= needed[split] for split in SPLITS)

    for source in sorted(sources, key=lambda source: source.bytes):  # the smallest may be enough
        unread = source.sizes(data.val_fraction)
        weighted = "" if source.placed == "val" else source.group
        while not is_enough(weighted) and (size := next(unread, None)):
            split, most_tokens = size[0], size[1] + 1  # with an end mark
            tokens[split] += most_tokens
            documents[split] += 1
            train_tokens_of[source.group] += most_tokens if split == "train" else 0
    if not is_enough():
        rejected = (piece for source in sources for piece in source.pieces() if isinstance(piece, RejectedRow))
        first = None if documents.total() else next(rejected, None)
        document.require_both_splits(documents["train"], documents["val"], data, first)
        scarce = min(tokens, key=lambda name: tokens[name])
        if window > tokens[scarce]:
            raise document.InvalidCorpus(
                f"model.block_size = {config.model.block_size}: the {scarce} split has at most {tokens[scarce]} "
                f"tokens; rule: block_size is at most {tokens[scarce] - 1}, one less than the tokens of each split. "
                "Lower model.block_size or add text to data.sources"
            )
        raise document.InvalidCorpus(
            f"data.tokenizer = {data.tokenizer!r}: vocabulary too big: {tokens['train']} bytes of train text "
            f"give at most {tokens['train'] + SMALLEST_BPE_VOCABULARY} ids, {vocabulary} are asked for; rule: the text "
            "fills the vocabulary. Ask for less or add text to data.sources"
        )
    for name, entry in zip(data.source_names[: len(data.sources)], data.sources, strict=True) if data.weights else ():
        if train_tokens_of[name] < window:
            raise snapshot_lookup.too_few_tokens(entry, train_tokens_of[name], config.model.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class AvailableMemory:
    """Bytes and cores that each trainer may take, the bytes None if unknown, and where they would train."""

    bytes: int | None
    cores: int
    place: size_estimate.TrainingPlace


def available_memory(training: TrainingConfig, group: TrainerGroup, *, planned_bytes: int = 0) -> AvailableMemory:
    """Return the memory of the system, or of the CUDA device; the processes of one machine share it.

    A device that is planned for has `planned_bytes`.
    """
    on_cuda = machine_speed.trains_on_cuda(training.device)
    place = size_estimate.TrainingPlace(on_cuda=on_cuda, processes=group.size, evaluates=True)
    cores = max(1, placement.usable_cores() // group.processes)
    if on_cuda:
        free = planned_bytes or machine_speed.free_device_bytes(training.device)
        return AvailableMemory(bytes=free, cores=cores, place=place)
    free = process_memory.available_memory_bytes(os.getpid())
    return AvailableMemory(bytes=None if free is None else free // group.processes, cores=cores, place=place)


def memory_room(config: RunConfig, vocab_size: int, memory: AvailableMemory) -> MemoryRoom | None:
    """Return the memory of an attempt after out-of-memory beside a running evaluator, None if it is unknown."""
    if memory.bytes is None:
        return None
    alone = replace(memory, place=replace(memory.place, evaluates=False))
    return MemoryRoom(
        bytes=memory.bytes, estimate=lambda sizes: estimate_trainer(config, vocab_size, sizes, alone).total_bytes
    )


def estimate_trainer(
    config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory
) -> size_estimate.MemoryEstimate:
    """Return the memory that one trainer of these sizes takes at its peak; of a module by trying one step."""
    if config.model.module:
        return machine_speed.try_module(config, vocab_size, asdict(sizes))
    micro_batch, recompute, place = sizes.micro_batch, sizes.activation_checkpointing, memory.place
    return size_estimate.estimate_memory(
        config.model, config.training, vocab_size, micro_batch=micro_batch, recompute=recompute, place=place
    )


def require_memory(config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory) -> None:
    """Raise `InvalidConfiguration` if a trainer of these sizes fits under none of the numerics still open."""
    if memory.bytes is None or not config.training.memory_check:
        return
    auto = ["fp32"] if config.model.module and not memory.place.on_cuda else ["fp32", "bf16"]  # as it is chosen
    precisions = auto if config.training.precision == "auto" else [config.training.precision]
    kernels = ["stock", "fused"] if config.training.kernels == "auto" else [config.training.kernels]
    possible = [config.with_mode(precision=one, kernels=other) for one in precisions for other in kernels]
    estimates = [estimate_trainer(one, vocab_size, sizes, memory).total_bytes for one in possible]
    needed = min(estimates)
    if needed <= memory.bytes:
        return
    leanest = possible[estimates.index(needed)]
    largest = partial(
        size_estimate.largest_micro_batch, leanest.model, leanest.training, vocab_size, memory_bytes=memory.bytes
    )
    cure = "not even 1 fits, with training.activation_checkpointing = true neither: train a smaller model"
    if config.model.module:
        cure = "rule: what fits. A module's memory is tried, not computed: choose a smaller one, or a smaller network"
    elif most := largest(recompute=sizes.activation_checkpointing, place=memory.place):
        cure = f"rule: at most {most} fits"
    elif recomputed := largest(recompute=True, place=memory.place):
        cure = f"not even 1 fits, but {recomputed} with training.activation_checkpointing = true"
    raise InvalidConfiguration(
        f"training.micro_batch = {sizes.micro_batch}: an estimated {format_quantity(needed)} a process, "
        f"{format_quantity(memory.bytes)} are available; {cure}. training.memory_check = false tries it all the same"
    )


def choose_workers(config: RunConfig, vocab_size: int, sizes: AttemptSizes, memory: AvailableMemory) -> int:
    """Return how many micro-batches a process computes at once: as many as it may, and has memory for."""
    place, count = memory.place, {"processes": memory.place.processes, "cores": memory.cores}
    most = 1 if place.on_cuda else most_workers(config.training, config.model, sizes, **count)
    if memory.bytes is None or config.training.workers != "auto":
        return most
    for workers in range(most, 1, -1):
        several = replace(memory, place=replace(place, workers=workers))
        if estimate_trainer(config, vocab_size, sizes, several).total_bytes <= memory.bytes * (1 - MARGIN):
            return workers
    return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRoom:
    """The room of a run's checkpoints: how many retention keeps at most, and the bytes beside those that are there.

    `late_bytes` is for those that a slow evaluator still needs, more the slower it is; `free_bytes` is free on the
    store's disk, None where there is no disk to ask.
    """

    bytes_each: int
    kept_at_most: int
    needed_bytes: int
    late_bytes: int
    free_bytes: int | None


def store_room(store: object_store.ObjectStore, state: RunState, config: RunConfig, vocab_size: int) -> StoreRoom:
    """Return the room that the checkpoints of a run take, beside those that it has already."""
    rules, total = config.checkpoint, config.training.steps
    commits, milestones = -(-total // rules.every_steps), total // rules.keep_every if rules.keep_every else 0
    kept = min(commits, rules.keep_last + rules.keep_best + milestones)
    if not config.model.module:
        each = size_estimate.checkpoint_bytes(config.model, config.training, vocab_size)
    elif (newest := state.newest_committed) is not None:
        each = newest.committed.bytes
    else:  # that of a trial's state
        sizes = next_sizes(state, config.training, config.model.block_size)
        tried = machine_speed.try_module(config, vocab_size, asdict(sizes))
        each = tried.parameters_bytes + tried.optimizer_bytes
    there = sum(record.committed.bytes for record in state.live_checkpoints)
    most = math.inf if rules.every_seconds else commits
    needed, with_late = (each * min(most, kept + beside) for beside in (_BESIDE_KEPT, _BESIDE_KEPT + _LATE))
    late, needed, free = int(with_late - needed), max(0, int(needed) - there), free_bytes(store)
    return StoreRoom(bytes_each=each, kept_at_most=kept, needed_bytes=needed, late_bytes=late, free_bytes=free)


def free_bytes(store: object_store.ObjectStore) -> int | None:
    """Return what is free on the store's disk, None where there is no disk to ask."""
    if (folder := store.local_path("runs")) is None:
        return None
    return shutil.disk_usage(next(parent for parent in folder.parents if parent.is_dir())).free


def require_room(store: object_store.ObjectStore, room: StoreRoom) -> None:
    """Raise `InvalidConfiguration` if the store's disk cannot hold the checkpoints that retention keeps."""
    if room.free_bytes is not None and room.needed_bytes > room.free_bytes:
        raise InvalidConfiguration(
            f"store {store.url}: {format_quantity(room.needed_bytes)} are needed for checkpoints of "
            f"{format_quantity(room.bytes_each)}, {format_quantity(room.free_bytes)} are free; free space, lower "
            "checkpoint.keep_last, keep_best or raise keep_every, or choose another --store"
        )
