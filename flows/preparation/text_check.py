"""Checks the text of a new run: readable sources, a usable tokenizer, and enough text for both splits.

A size is refused here only if no tokenizer could make it possible.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.preparation.planned_data import preview_sources
from model.configuration.data import SMALLEST_BPE_VOCABULARY
from model.data.tokenizer import Tokenizer
from model.errors import InvalidInput
from storage.snapshots.document_index import SPLITS, SplitName
from tasks.configuration.run_configuration import RunConfig
from tasks.data.document import Document, InvalidCorpus, Source, require_both_splits, split_of
from tasks.data.source_weights import too_few_tokens


def check_text(config: RunConfig, base_dir: Path) -> None:
    """Raise `InvalidCorpus` for a source or tokenizer that cannot be read, or too little text."""
    has_tokenizer_file = config.data.tokenizer.endswith(".json")
    if has_tokenizer_file:
        _check_tokenizer(config.data.tokenizer, base_dir)
    sources = preview_sources(config.data, base_dir)
    if not has_tokenizer_file:  # a token is known to hold at least a byte only with our own byte-level tokenizers
        _check_sizes(config, sources)


def _check_tokenizer(path: str, base_dir: Path) -> None:
    try:
        Tokenizer.from_file(base_dir / Path(path).expanduser())
    except InvalidInput as error:
        raise InvalidCorpus(
            f"data.tokenizer = {path!r}: {error}; rule: bytes, bpe:<size> or a tokenizer.json"
        ) from error


class _TokenCount:
    """The most tokens that the text read so far can give: one a byte, and an end mark a document."""

    def __init__(self, config: RunConfig, vocabulary: int) -> None:
        self._val_fraction, self._window = config.data.val_fraction, config.model.block_size + 1
        merges = vocabulary - SMALLEST_BPE_VOCABULARY  # each needs a byte of train text
        self._needed = {"train": max(self._window, merges), "val": self._window}
        self.tokens, self.documents = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        self.train_tokens_of = Counter[str]()

    def add(self, document: Document, group: str) -> None:
        split = split_of(document.sha256, self._val_fraction)
        self.tokens[split] += document.bytes + 1
        self.documents[split] += 1
        if split == "train":
            self.train_tokens_of[group] += document.bytes + 1

    def is_enough(self) -> bool:
        return all(self.tokens[split] >= self._needed[split] for split in SPLITS)

    def is_enough_of(self, group: str) -> bool:
        return not group or self.train_tokens_of[group] >= self._window


def _check_sizes(config: RunConfig, sources: Sequence[Source]) -> None:
    """Read the text only until no split, and no weighted source, can be too small."""
    vocabulary = config.data.bpe_vocab_size or SMALLEST_BPE_VOCABULARY
    count = _TokenCount(config, vocabulary)
    for source in sources:
        documents = source.documents()
        while not (count.is_enough() and count.is_enough_of(source.group)) and (document := next(documents, None)):
            count.add(document, source.group)
    if not count.is_enough():
        require_both_splits(count.documents["train"], count.documents["val"], config.data.val_fraction)
        raise _too_little_text(config, count.tokens, vocabulary)
    for name, entry in zip(config.data.source_names, config.data.sources, strict=True) if config.data.weights else ():
        if not count.is_enough_of(name):
            raise too_few_tokens(entry, count.train_tokens_of[name], config.model.block_size)


def _too_little_text(config: RunConfig, tokens: Mapping[SplitName, int], vocabulary: int) -> InvalidCorpus:
    scarce = min(tokens, key=lambda name: tokens[name])
    if config.model.block_size + 1 > tokens[scarce]:
        return InvalidCorpus(
            f"model.block_size = {config.model.block_size}: the {scarce} split has at most {tokens[scarce]} tokens; "
            f"rule: block_size is at most {tokens[scarce] - 1}, one less than the tokens of each split. Lower "
            "model.block_size or add text to data.sources"
        )
    return InvalidCorpus(
        f"data.tokenizer = {config.data.tokenizer!r}: vocabulary too big: {tokens['train']} bytes of train text "
        f"give at most {tokens['train'] + SMALLEST_BPE_VOCABULARY} ids, {vocabulary} are asked for; rule: the text "
        "fills the vocabulary. Ask for less or add text to data.sources"
    )
