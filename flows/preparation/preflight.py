"""Refuses before anything starts what cannot work: configuration, drift, store, text, tokenizer, sizes, memory.

A server takes seconds to start; a text too small for every tokenizer is refused here, tokenizing checks exactly.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cairn.flows.preparation.resource_check import available_memory, require_memory, require_room, store_room
from cairn.flows.preparation.training_request import ResolvedRequest, configure_run
from cairn.model.configuration.data import SMALLEST_BPE_VOCABULARY, DataConfig
from cairn.model.errors import InvalidInput
from cairn.model.estimates.numerics import MachineSpeed
from cairn.reports.exporters.exporters import check_exporters
from cairn.storage.errors import StoreRefused, StoreUnavailable
from cairn.storage.logs.run_log import RunLog
from cairn.storage.logs.run_state import RunState
from cairn.storage.snapshots.data_snapshot import read_manifest
from cairn.storage.snapshots.document_index import SPLITS
from cairn.storage.stores import object_store, store_probe
from cairn.storage.stores.open_store import open_store
from cairn.tasks.attempt.attempt_claim import refuse_deleted
from cairn.tasks.attempt.injected_faults import parse_faults
from cairn.tasks.configuration.run_configuration import RunConfig
from cairn.tasks.configuration.stored_configuration import check_drift
from cairn.tasks.data import corpus, document, foreign_tokenizer, snapshot_build, snapshot_lookup
from cairn.tasks.errors import InvalidConfiguration, TaskError
from cairn.tasks.machine import machine_speed, placement
from cairn.tasks.policy.attempt_sizes import next_sizes
from cairn.tasks.trainer.initial_weights import InitialDirectory, check_directory
from cairn.tasks.trainer.trainer_group import trainer_group

_MOST_EARLY_BYTES = 16 * 1024 * 1024
"""Of sources: more text takes longer than a server's start, and the flow shows how far it is."""


def check_before_start(
    resolved: ResolvedRequest, log: RunLog, environment: Mapping[str, str], *, writable: bool = True
) -> RunConfig:
    """Read the log, return the run's configuration; raises what ends a command; `writable` probes a new store."""
    try:
        opened = log.refresh().opened
    except StoreUnavailable as error:
        problem = f"store {log.store.url}: cannot be read: {error}; name another with --store"
        raise InvalidConfiguration(problem) from error
    refuse_deleted(log.state)
    wanted = configure_run(resolved, log.state, environment)
    if opened is not None:
        check_drift(opened.config, wanted, run_id=log.run_id)
    try:
        parse_faults(environment.get("CAIRN_FAULTS", ""))
        machine_speed.require_device(wanted.training.device)
        group = trainer_group(wanted.training, environment)
        next_sizes(log.state, wanted.training, processes=group.size)
    except TaskError as error:
        raise InvalidConfiguration(str(error)) from error
    check_exporters(wanted.mirrors)
    if opened is not None:
        if writable and log.state.finished is None and log.state.open_attempt is None:  # otherwise its owner may live
            _check_memory(wanted, log.state, read_manifest(log.store, opened.data_snapshot).vocab_size, environment)
        return wanted
    if writable:
        try:
            store_probe.probe_store(log.store)
        except StoreRefused as error:  # one that is unavailable or full for now may work in a minute
            rule = "rule: a folder or bucket this user may write to, chosen with --store or CAIRN_STORE"
            raise InvalidConfiguration(f"store {log.store.url}: cannot be written: {error}; {rule}") from error
    vocab_size = _check_data(log.store, wanted, resolved.base_dir)
    if writable:
        _check_memory(wanted, log.state, vocab_size, environment)
        require_room(log.store, store_room(log.store, log.state, wanted, vocab_size))
    return wanted


def prepare_early(
    resolved: ResolvedRequest, config: RunConfig, environment: Mapping[str, str], ask: Callable[[], MachineSpeed | None]
) -> Callable[[], None]:
    """Make ready, while a temporary server starts, what the flow of a new run needs first: a small text, and numerics.

    The flow's own steps then find both; what fails here fails there again, and is reported there. It is done in a
    thread that ends with the process; the function that is returned waits for it. This one waits until the text is
    read: Python would read and import by turns, but imports run beside the tokenizer, which is no Python.
    """
    is_read = threading.Event()

    def prepare() -> None:
        folder = placement.work_folder(environment)
        with suppress(Exception):
            try:
                sources = corpus.preview_corpus(config.data, resolved.base_dir)
                is_small = sum(source.bytes for source in sources) <= _MOST_EARLY_BYTES
                for source in sources if is_small else ():
                    deque(source.documents(), maxlen=0)
            finally:
                is_read.set()
            if is_small:
                snapshot_build.build_snapshot(
                    open_store(resolved.store_url), config.data, resolved.base_dir, cache_dir=folder
                )
                machine_speed.numerics_here(config.training, config.model, folder, ask=ask)

    thread = threading.Thread(target=prepare, name="early", daemon=True)
    thread.start()
    is_read.wait()
    return thread.join


def wanted_vocab_size(data: DataConfig, base_dir: Path) -> int:
    """Return how many ids the tokenizer that the configuration asks for has."""
    if data.tokenizer.endswith(".json"):
        return foreign_tokenizer.read_tokenizer(base_dir / Path(data.tokenizer).expanduser()).vocab_size
    return data.bpe_vocab_size or SMALLEST_BPE_VOCABULARY


def _check_data(store: object_store.ObjectStore, config: RunConfig, base_dir: Path) -> int:
    """Check a new run's data and initial weights; returns the vocabulary size."""
    if config.data.snapshot:
        manifest = snapshot_lookup.find_by_id(store, config.data.snapshot).manifest
        snapshot_build.check_block_size(manifest, config.model.block_size, config.data)
        vocab_size = manifest.vocab_size
    elif config.data.tokenizer.endswith(".json"):
        try:
            vocab_size = wanted_vocab_size(config.data, base_dir)
        except InvalidInput as error:
            rule = "rule: bytes, bpe:<size> or a tokenizer.json"
            raise document.InvalidCorpus(f"data.tokenizer = {config.data.tokenizer!r}: {error}; {rule}") from error
        corpus.preview_corpus(config.data, base_dir)
    else:  # a token of our own byte-level tokenizers is known to hold at least a byte
        _check_sizes(config, base_dir)
        vocab_size = wanted_vocab_size(config.data, base_dir)
    if config.training.init_from is not None:
        check_directory(InitialDirectory(config.training.init_from, base_dir), config.model, vocab_size)
    return vocab_size


def _check_memory(config: RunConfig, state: RunState, vocab_size: int, environment: Mapping[str, str]) -> None:
    # Asking a device takes a process with torch; a run that has attempts has trained on its device before.
    is_known_to_fit = bool(state.attempts) and machine_speed.trains_on_cuda(config.training.device)
    if config.training.memory_check and not is_known_to_fit:
        group = trainer_group(config.training, environment)
        sizes = next_sizes(state, config.training, processes=group.size, chosen=1)
        require_memory(config, vocab_size, sizes, available_memory(config.training, group))


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
        while not is_enough(source.group) and (size := next(unread, None)):
            split, most_tokens = size[0], size[1] + 1  # with an end mark
            tokens[split] += most_tokens
            documents[split] += 1
            train_tokens_of[source.group] += most_tokens if split == "train" else 0
    if not is_enough():
        rejected = (piece for source in sources for piece in source.pieces() if isinstance(piece, document.Rejected))
        first = None if documents.total() else next(rejected, None)
        document.require_both_splits(documents["train"], documents["val"], data.val_fraction, first)
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
    for name, entry in zip(data.source_names, data.sources, strict=True) if data.weights else ():
        if train_tokens_of[name] < window:
            raise snapshot_lookup.too_few_tokens(entry, train_tokens_of[name], config.model.block_size)
