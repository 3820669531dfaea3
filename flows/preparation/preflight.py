"""What can be refused before anything is started: configuration, drift, store, text, tokenizer, sizes.

Owns the cheap refusals: the orchestrator's server takes seconds to start, and nobody should wait for it to hear of a
typing error. The flow checks again, exactly; here a size is refused only when no tokenizer could make it possible.
"""

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.preparation.memory_check import memory_there, require_memory
from model.configuration.data import DataConfig
from model.data.tokenizer import Tokenizer
from model.errors import InvalidInput
from reports.exporters.exporters import check_exporters
from reports.queries.run_lookup import configuration_document
from storage.errors import StoreRefused, StoreUnavailable
from storage.logs.run_log import RunLog
from storage.logs.run_state import RunState
from storage.snapshots.data_snapshot import read_manifest
from storage.stores.object_store import ObjectStore
from storage.stores.store_probe import probe_store
from tasks.configuration.configuration_source import configuration_folder, configuration_name, read_configuration
from tasks.configuration.run_configuration import RunConfig, check_drift, parse_configuration
from tasks.data.corpus import preview_corpus
from tasks.data.document import Document, InvalidCorpus, Source
from tasks.data.document_reader import ReadingRules
from tasks.data.document_split import Split, require_both_splits, split_of
from tasks.data.snapshot_build import check_block_size
from tasks.data.snapshot_choice import chosen_snapshot
from tasks.data.source_weights import too_few_tokens
from tasks.errors import InvalidConfiguration, TaskError
from tasks.machine.device_memory import trains_on_cuda
from tasks.policy.attempt_sizes import next_sizes
from tasks.trainer.initial_weights import check_directory, find_directory
from tasks.trainer.trainer_group import trainer_group

_BYTES_AND_END = 257
_NEVER_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""What no waiting mends; a full disk is not among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """What `cairn train` was asked for."""

    config: str
    run_id: str
    overrides: tuple[str, ...]
    start_over: bool = False


def named_run(request: TrainingRequest) -> str:
    """Return the run's id: the given one, else the configuration file's name."""
    if request.run_id:
        return request.run_id
    if not request.config:
        raise InvalidConfiguration("neither a configuration file nor --run-id: say which run to train or continue")
    return configuration_name(request.config)


def check_before_start(
    store: ObjectStore,
    request: TrainingRequest,
    environment: Mapping[str, str],
    *,
    writable: bool = True,
    before_text: Callable[[], None] = lambda: None,
) -> RunConfig:
    """Return the validated configuration; raises what makes the command leave at once.

    That a new run can be kept is found out by writing, unless `writable` is false: then nothing is written at all.
    Of a new run `before_text` is called when only its text and sizes, which may take seconds, can still refuse it.
    """
    log = RunLog(store, named_run(request))
    wanted = None
    if request.config:
        # Before the store: a typing error is told even without one.
        wanted = wanted_configuration(request, log.state, environment)
    try:
        opened = log.refresh().opened
    except StoreUnavailable as error:
        raise InvalidConfiguration(f"store {store.url}: cannot be read: {error}; name another with --store") from error
    if opened is not None:
        wanted = (wanted or wanted_configuration(request, log.state, environment)).as_opened(opened.config)
        check_drift(opened.config, wanted, run_id=log.run_id)
        _check_processes(wanted, environment)
        check_exporters(wanted.mirrors)
        if writable and log.state.finished is None and log.state.open_attempt is None:  # else an owner may live
            _check_memory(wanted, log.state, read_manifest(store, opened.data_snapshot).vocab_size, environment)
        return wanted
    wanted = wanted or wanted_configuration(request, log.state, environment)
    _check_processes(wanted, environment)
    check_exporters(wanted.mirrors)
    if writable:
        _check_store(store)
    before_text()
    base_dir = configuration_folder(request.config)
    if wanted.data.snapshot:
        manifest = chosen_snapshot(store, wanted.data.snapshot).manifest
        check_block_size(manifest, wanted.model.block_size, wanted.data)
    else:
        _check_text(wanted, base_dir)
    vocab_size = _vocabulary(store, wanted.data, base_dir)
    if wanted.training.init_from is not None:
        check_directory(find_directory(wanted.training.init_from, base_dir), wanted.model, vocab_size)
    if writable:
        _check_memory(wanted, log.state, vocab_size, environment)
    return wanted


def wanted_configuration(request: TrainingRequest, state: RunState, environment: Mapping[str, str]) -> RunConfig:
    """Return what the file says, or without one what the log says, overrides on top.

    Which arithmetic a run trains in is decided once: of a run that is opened, `auto` means what was frozen then.
    The log says all of it: the newest attempt's budgets, lease and checkpoint interval too, not only what is frozen.
    """
    if request.config or state.opened is None:
        try:
            wanted = read_configuration(request.config, overrides=request.overrides, environment=environment)
            return wanted if state.opened is None else wanted.as_opened(state.opened.config)
        except InvalidConfiguration as error:
            if request.config:
                raise
            missing = f"run {request.run_id!r} is not in this store, and no configuration file says what to train"
            # Who overrides nothing wanted to continue, and forgot no key but the store or the name.
            problem = str(error) if request.overrides else "`cairn runs` lists those there are; --store names another"
            raise InvalidConfiguration(f"{missing}: {problem}") from error
    wanted = parse_configuration(
        configuration_document(state),
        overrides=request.overrides,
        environment=environment,
        name=f"run {state.opened.run_id}",
    )
    return wanted.as_opened(state.opened.config)


def _check_store(store: ObjectStore) -> None:
    try:
        probe_store(store)
    except StoreUnavailable as error:
        if not _needs_another_store(error):  # away or full for now: the same command may do in a minute
            raise
        raise InvalidConfiguration(
            f"store {store.url}: cannot be written: {error}; rule: a folder or bucket this user may write to, "
            "chosen with --store or CAIRN_STORE"
        ) from error


def _needs_another_store(error: StoreUnavailable) -> bool:
    if isinstance(error, StoreRefused):
        return True
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NEVER_WRITABLE


def _check_processes(config: RunConfig, environment: Mapping[str, str]) -> None:
    try:
        trainer_group(config.training, environment)
    except TaskError as error:
        raise InvalidConfiguration(str(error)) from error


def _check_text(config: RunConfig, base_dir: Path) -> None:
    _check_tokenizer(config.data, base_dir)
    rules = ReadingRules(text_field=config.data.text_field, max_document_bytes=config.data.max_document_bytes)
    groups = config.data.source_names if config.data.weights else ()
    sources = preview_corpus(config.data.sources, base_dir, rules, groups=groups)
    if not config.data.tokenizer.endswith(".json"):  # only of byte-level tokens is it known that each has a byte
        _check_sizes(config, sources)


def _vocabulary(store: ObjectStore, data: DataConfig, base_dir: Path) -> int:
    """How many ids the data of a new run has, or is asked to have."""
    if data.snapshot:
        return chosen_snapshot(store, data.snapshot).manifest.vocab_size
    if data.tokenizer.endswith(".json"):
        return Tokenizer.from_file(base_dir / Path(data.tokenizer).expanduser()).vocab_size
    return data.bpe_vocab_size or _BYTES_AND_END


def _check_memory(config: RunConfig, state: RunState, vocab_size: int, environment: Mapping[str, str]) -> None:
    # A device is asked for a new run only: that takes a process with torch, and who continues has trained there before.
    asked = not (state.attempts and trains_on_cuda(config.training.device))
    if config.training.memory_check and asked:
        there = memory_there(config.training, trainer_group(config.training, environment))
        require_memory(config, vocab_size, next_sizes(state, config.training, chosen=1), there)


def _check_tokenizer(data: DataConfig, base_dir: Path) -> None:
    if not data.tokenizer.endswith(".json"):
        return
    try:
        Tokenizer.from_file(base_dir / Path(data.tokenizer).expanduser())
    except InvalidInput as error:
        raise InvalidCorpus(
            f"data.tokenizer = {data.tokenizer!r}: {error}; rule: bytes, bpe:<size> or a tokenizer.json"
        ) from error


class _TextHeld:
    """How many tokens the text read so far gives at most: a token holds a byte or more, a document adds one mark."""

    def __init__(self, config: RunConfig, vocabulary: int) -> None:
        self._val_fraction, self._window = config.data.val_fraction, config.model.block_size + 1
        merges = vocabulary - _BYTES_AND_END  # each costs a byte of train text
        self._needed = {Split.TRAIN: max(self._window, merges), Split.VAL: self._window}
        self.tokens, self.documents = dict.fromkeys(Split, 0), dict.fromkeys(Split, 0)
        self.train_tokens_of = Counter[str]()

    def add(self, document: Document, group: str) -> None:
        split = split_of(document.sha256, self._val_fraction)
        self.tokens[split] += document.bytes + 1
        self.documents[split] += 1
        if split is Split.TRAIN:
            self.train_tokens_of[group] += document.bytes + 1

    def is_enough(self) -> bool:
        return all(self.tokens[split] >= self._needed[split] for split in Split)

    def is_enough_of(self, group: str) -> bool:
        return not group or self.train_tokens_of[group] >= self._window


def _check_sizes(config: RunConfig, sources: Sequence[Source]) -> None:
    """Read only as far as needed to know that no split, and no weighted source, is too small whatever the tokenizer."""
    vocabulary = config.data.bpe_vocab_size or _BYTES_AND_END
    held = _TextHeld(config, vocabulary)
    for source in sources:
        documents = source.documents()
        while not (held.is_enough() and held.is_enough_of(source.group)) and (document := next(documents, None)):
            held.add(document, source.group)
    if not held.is_enough():
        require_both_splits(held.documents[Split.TRAIN], held.documents[Split.VAL], config.data.val_fraction)
        _refuse_sizes(config, held.tokens, vocabulary)
    for name, entry in zip(config.data.source_names, config.data.sources, strict=True) if config.data.weights else ():
        if not held.is_enough_of(name):
            raise too_few_tokens(entry, held.train_tokens_of[name], config.model.block_size)


def _refuse_sizes(config: RunConfig, held: Mapping[Split, int], vocabulary: int) -> None:
    scarce = min(held, key=lambda name: held[name])
    if config.model.block_size + 1 > held[scarce]:
        raise InvalidCorpus(
            f"model.block_size = {config.model.block_size}: the {scarce} split has at most {held[scarce]} tokens; "
            f"rule: block_size is at most {held[scarce] - 1}, one less than the tokens of each split. Lower "
            "model.block_size or add text to data.sources"
        )
    raise InvalidCorpus(
        f"data.tokenizer = {config.data.tokenizer!r}: vocabulary too big: {held[Split.TRAIN]} bytes of train text give "
        f"at most {held[Split.TRAIN] + _BYTES_AND_END} ids, {vocabulary} are asked for; rule: the text fills the "
        "vocabulary. Ask for less or add text to data.sources"
    )
