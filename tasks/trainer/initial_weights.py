"""Reads the weights and the network that a run starts from out of a Hugging Face directory, and keeps them.

They are stored as `initial/<sha256>/`: every start uses exactly those bytes and needs the directory no more. So are its
name, licence and hashes, and the documents that exports carry on: bounded texts under known names, and no code.
Refuses pickles. Imports no torch, because the process that opens a run holds no tensors.
Source: the layout of `PreTrainedModel.save_pretrained`, whole or in shards.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load, save

from cairn.model.architectures import hugging_face
from cairn.model.configuration.network import ModelConfig
from cairn.model.errors import InvalidInput
from cairn.model.estimates.size_estimate import count_parameters
from cairn.storage.checkpoints.payload import NUMPY_TYPES, chunks_of
from cairn.storage.errors import IntegrityError, restated
from cairn.storage.stores import codec
from cairn.storage.stores.object_store import ExpectedObject, ObjectStore, check_object, read_verified
from cairn.storage.stores.regular_file import read_file
from cairn.tasks.configuration.addresses import expand_home
from cairn.tasks.data import foreign_tokenizer
from cairn.tasks.text.format import one_line

CONFIG = "config.json"
TOKENIZER, CARD = "tokenizer.json", "README.md"
SOURCE, KEPT = "source.json", "weights.safetensors"
"""The objects of initial weights in a store."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OF_NETWORK = (CONFIG, "generation_config.json")
CARRIED = (*_OF_NETWORK, *foreign_tokenizer.BESIDE)
_MOST_BYTES, _MOST_CARD_BYTES, _MOST_LICENCE = 8 << 20, 1 << 20, 100
_BYTES_PER_PARAMETER, _MOST_OTHER_BYTES = 16, 256 << 20  # GPT-2's files also hold a mask for each layer
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class InitialDirectory:
    """A directory with weights, as `training.init_from` names it, or a URL; a relative path starts at `base_dir`."""

    named: str
    base_dir: Path

    @property
    def url(self) -> str:
        """The URL, empty for a folder."""
        return self.named.rstrip("/") if "://" in self.named else ""

    @property
    def folder(self) -> Path:
        """The directory's path, of a URL that of copies of all but its weights; raises InvalidInput."""
        if self.url:
            return _copy_documents(self.url)
        return self.base_dir / expand_home("training.init_from", self.named)


@cache
def _copy_documents(url: str) -> Path:
    return foreign_tokenizer.copy_files(url, (*CARRIED, TOKENIZER, INDEX, CARD))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    weight_map: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptWeights:
    """The hashes under which a store has initial weights, and what is kept of the directory that they came from."""

    weights_sha256: str
    source_sha256: str


def adopt_network(directory: InitialDirectory, model: ModelConfig) -> ModelConfig:
    """Return [model] as the directory's `config.json` completes it; InvalidInput where a key says something else."""
    with _naming(directory):
        return hugging_face.adopt_network(_config(directory.folder), model)


def check_directory(directory: InitialDirectory, model: ModelConfig, vocab_size: int) -> None:
    """Raise InvalidInput if the weights do not fit this model and vocabulary; reads no weights.

    More rows than ids are those of a padded embedding if the directory's tokenizer has as many ids.
    """
    with _naming(directory):
        found = _config(directory.folder)
        hugging_face.check_settings(found, model)
        _weight_files(directory)
        if found.vocab_size != vocab_size and not vocab_size == _own_ids(directory.folder) < found.vocab_size:
            problem = f"the tokenizer has {vocab_size} ids, the weights have {found.vocab_size}"
            raise _other_vocabulary(directory, problem)


def keep_initial_weights(
    store: ObjectStore, directory: InitialDirectory, model: ModelConfig, *, tokenizer_json: str, vocab_size: int
) -> KeptWeights:
    """Check the weights against model and tokenizer, store them once; raises InvalidInput."""
    check_directory(directory, model, vocab_size)
    with _naming(directory):
        has_tokenizer = _check_tokenizer(directory, tokenizer_json)
        most_bytes = _BYTES_PER_PARAMETER * count_parameters(model, vocab_size) + _MOST_OTHER_BYTES
        arrays, digests = dict[str, NDArray[Any]](), dict[str, str]()
        for path in _weight_files(directory):
            if directory.url:
                foreign_tokenizer.copy_files(directory.url, [path.name], most_bytes)
            digests[path.name] = _read_arrays(path, most_bytes, into=arrays)
            if directory.url:
                path.unlink()
        source = describe_source(directory.folder, digests, has_tokenizer=has_tokenizer, url=directory.url)
        content = save(hugging_face.from_hugging_face(arrays, model, vocab_size), {"format": "pt"})
        kept = KeptWeights(weights_sha256=hashlib.sha256(content).hexdigest(), source_sha256=keep_source(store, source))
    with suppress(IntegrityError):  # missing or damaged
        check_object(store, promised_object(store, kept.weights_sha256, KEPT))
        return kept
    store.write_stream(initial_key(kept.weights_sha256, KEPT), chunks_of(memoryview(content)))
    return kept


def read_initial_weights(store: ObjectStore, sha256: str) -> dict[str, NDArray[np.float32]]:
    """Return the stored weights by the network's names; raises IntegrityError if a byte has changed."""
    promised = promised_object(store, sha256, KEPT)
    # A KeyError is that of a number format that NumPy has not.
    with restated((SafetensorError, KeyError), IntegrityError, promised.key):
        return load(bytes(read_verified(store, promised)))


def _config(folder: Path) -> hugging_face.HuggingFaceConfig:
    with restated(OSError, InvalidInput, f"{CONFIG} cannot be read", rule="a directory of save_pretrained"):
        return hugging_face.parse_config(read_file(folder / CONFIG))


def _weight_files(directory: InitialDirectory) -> tuple[Path, ...]:
    folder, is_remote = directory.folder, bool(directory.url)
    if (folder / WEIGHTS).exists() or (is_remote and not (folder / INDEX).exists()):
        return (folder / WEIGHTS,)
    if not (folder / INDEX).exists():
        if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
            problem = f"{pickles[0]} is a pickle, which may run any code when it is read"
            remedy = "load it where you trust it and save_pretrained(…, safe_serialization=True)"
            raise InvalidInput(f"{problem}; rule: {WEIGHTS}, whole or in shards; {remedy}")
        raise InvalidInput(f"holds neither {WEIGHTS} nor {INDEX}; rule: a directory of save_pretrained")
    with restated((OSError, IntegrityError), InvalidInput, f"{INDEX} cannot be read"):
        names = sorted(set(codec.decode(read_file(folder / INDEX), _Index, where=INDEX).weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInput(f"{INDEX} names {name!r}; rule: plain names of .safetensors files")
        if not is_remote and not (folder / name).exists():
            raise InvalidInput(f"{name} is missing, which {INDEX} names; complete the directory")
    if not names:
        raise InvalidInput(f"{INDEX} names no file; complete the directory")
    return tuple(folder / name for name in names)


def _read_arrays(path: Path, most_bytes: int, *, into: dict[str, NDArray[Any]]) -> str:
    """Add the arrays of a file and return its SHA-256."""
    with restated((OSError, SafetensorError, ValueError, InvalidInput), InvalidInput, f"{path.name} cannot be read"):
        data = read_file(path, most_bytes)
        # The library's own reader for numpy has no bfloat16.
        for name, tensor in deserialize(data):  # type: ignore[no-untyped-call]
            if tensor["dtype"] not in NUMPY_TYPES:
                raise InvalidInput(f"{name} is {tensor['dtype']}; rule: one of {', '.join(NUMPY_TYPES)}")
            flat = np.frombuffer(tensor["data"], dtype=NUMPY_TYPES[tensor["dtype"]])
            if tensor["dtype"] == "BF16":  # the upper half of a float32
                flat = (flat.astype("<u4") << 16).view("<f4")
            into[name] = flat.reshape(tensor["shape"])  # (values,) -> its shape
        return hashlib.sha256(data).hexdigest()


def _own_tokens(folder: Path) -> Mapping[str, int]:
    """Return the ids of the directory's own tokenizer by token; none without one."""
    if not (folder / TOKENIZER).exists():
        return {}
    broken, rule = (OSError, UnicodeDecodeError, InvalidInput), "a whole one, or none; repair it or remove it"
    with restated(broken, InvalidInput, f"{TOKENIZER} cannot be read", rule=rule):
        return foreign_tokenizer.read_library_tokenizer(folder / TOKENIZER).get_vocab(with_added_tokens=True)


def _own_ids(folder: Path) -> int:
    return max(_own_tokens(folder).values(), default=-1) + 1


def _check_tokenizer(directory: InitialDirectory, tokenizer_json: str) -> bool:
    """Refuse a tokenizer with other ids than the weights' own; returns whether the directory has one, with those."""
    theirs = _own_tokens(directory.folder)
    ours = foreign_tokenizer.load_library_tokenizer(tokenizer_json).get_vocab(with_added_tokens=True)
    # Tokens that were imported without their tokenizer have a placeholder, in which only end-of-text has a name.
    is_placeholder = sum(text != str(number) for text, number in ours.items()) <= 1
    if theirs and not is_placeholder and theirs != ours:
        raise _other_vocabulary(directory, f"the tokenizer is another than the weights' own {TOKENIZER}")
    return theirs == ours


def _other_vocabulary(directory: InitialDirectory, problem: str) -> InvalidInput:
    rule = "rule: the tokens mean what they meant to the weights"
    there = (directory.folder / TOKENIZER).exists()
    use = f"; use data.tokenizer = {str(Path(directory.named) / TOKENIZER)!r}" if there else ""
    return InvalidInput(f"{problem}; {rule}{use}")


@contextmanager
def _naming(directory: InitialDirectory) -> Iterator[None]:
    """Name the key and the directory in each refusal of the block."""
    try:
        yield
    except InvalidInput as error:
        # What a library says can hold the whole file.
        raise InvalidInput(f"training.init_from = {directory.named!r}: {one_line(str(error), 1000)}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """A folder of weights: `files` has the SHA-256 of each one that was used, `documents` the text of those carried.

    `licence` is that of its README.md, or empty. Its tokenizer is among `files` if the run has the same.
    """

    name: str
    licence: str
    files: Mapping[str, str]
    documents: Mapping[str, str]

    @property
    def has_tokenizer(self) -> bool:
        """Whether the run's tokenizer is the folder's, so that its documents hold for it."""
        return TOKENIZER in self.files

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids with which its texts end, if the run has its tokenizer: that of a turn too."""
        found = set[int]()
        for name in (name for name in _OF_NETWORK if self.has_tokenizer and name in self.documents):
            ends = foreign_tokenizer.parse_document(name, self.documents[name]).get("eos_token_id")
            found.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
        return frozenset(found)


def describe_source(folder: Path, weights: Mapping[str, str], *, has_tokenizer: bool, url: str = "") -> WeightsSource:
    """Read what is kept of a folder whose weight files have these hashes; raises InvalidInput naming the file."""
    names = CARRIED if has_tokenizer else _OF_NETWORK
    found = {name: foreign_tokenizer.read_document(folder / name) for name in names}
    documents = {name: text for name, text in found.items() if text is not None}
    files = {name: codec.sha256(text.encode()) for name, text in documents.items()} | dict(weights)
    if has_tokenizer:
        files[TOKENIZER] = codec.sha256(read_file(folder / TOKENIZER, 64 << 20))
    return WeightsSource(name=url or folder.resolve().name, licence=_licence(folder), files=files, documents=documents)


def keep_source(store: ObjectStore, source: WeightsSource) -> str:
    """Store it under its SHA-256, which is returned; raises InvalidInput for documents that are too large together."""
    if len(content := codec.encode(source)) > _MOST_BYTES:
        raise InvalidInput(f"{', '.join(source.documents)}: {len(content):,} bytes; rule: at most {_MOST_BYTES:,}")
    sha256 = codec.sha256(content)
    store.write(initial_key(sha256, SOURCE), content)
    return sha256


def read_source(store: ObjectStore, sha256: str) -> WeightsSource:
    """Return a stored source; raises IntegrityError if it is missing, or a byte has changed."""
    promised = promised_object(store, sha256, SOURCE)
    return codec.decode(bytes(read_verified(store, promised)), WeightsSource, where=promised.key)


def promised_object(store: ObjectStore, sha256: str, name: str) -> ExpectedObject:
    """Return the stored object of initial weights or of their source; raises IntegrityError if it is missing."""
    if (size := store.size(key := initial_key(sha256, name))) is None:
        raise IntegrityError(f"{key}: missing, and the run started from it; restore it, or start another run")
    return ExpectedObject(key=key, bytes=size, sha256=sha256)


def initial_key(sha256: str, name: str) -> str:
    """Return the key of an object that a run begins with."""
    return f"initial/{sha256}/{name}"


def _licence(folder: Path) -> str:
    """Return the licence that the front matter of a model card names, empty without one."""
    try:
        first, *lines = read_file(folder / CARD, _MOST_CARD_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return ""
    front = itertools.takewhile(lambda line: line != "---", lines if first == "---" else ())
    named = (line.partition(":")[2].strip(" \"'") for line in front if line.startswith("license:"))
    return next(named, "")[:_MOST_LICENCE]
