"""What is read correctly keeps its snapshot id: the table is of the packages in constraints.txt, pyarrow's among them.

A line changes only with a package that writes other bytes, or because its text was not read correctly.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cairn.model.configuration.data import DataConfig
from cairn.model.data import tokenizer
from cairn.tasks.data import snapshot_build
from cairn.tasks.data.document import InvalidCorpus
from cairn.tasks.data.encoding_process import FastEncoder
from cairn.tasks.data.snapshot_build import BuildProgress, BuildStage, build_snapshot
from tests.memory_store import MemoryStore
from tests.tasks.corpus_files import shaped
from tests.tasks.tokenizer_kinds import KINDS, MORE, PARAGRAPHS, TEXTS

pytestmark = pytest.mark.usefixtures("forked_parsers")


def stored_zstd(content: bytes) -> bytes:
    """Return one zstd frame of one raw block (RFC 8878): equal bytes with every version of the library."""
    return b"\x28\xb5\x2f\xfd\xa0" + len(content).to_bytes(4, "little") + _block(content) + content


def _block(content: bytes) -> bytes:
    return (len(content) << 3 | 1).to_bytes(3, "little")


FILES = {
    "a.txt": "\n\n".join(TEXTS).encode(),
    "b.txt": "\r\n".join(MORE * 9).encode(),
    "accents.txt": "Grüße aus 漢字, \N{MOUNTAIN}: e\u0301 é\n".encode() * 20,
    "a.jsonl": shaped(TEXTS, "jsonl"),
    "twice.jsonl": shaped([*TEXTS, *PARAGRAPHS[:9]], "jsonl"),
    "body.ndjson": b"".join(json.dumps({"body": text, "n": 1}).encode() + b"\r\n" for text in TEXTS),
    "bad.jsonl": shaped(TEXTS, "jsonl") + b'no JSON\n{"text": 7}\n{"other": "x"}\n{"text": " "}\n{"text": "\xff"}\n',
    "long.jsonl": shaped(["\n".join(PARAGRAPHS), *MORE], "jsonl"),
    "rows.parquet": shaped(TEXTS, "parquet"),
    "packed.jsonl.gz": gzip.compress(shaped(TEXTS, "jsonl"), compresslevel=0, mtime=0),
    "packed.txt.zst": stored_zstd("\n\n".join(TEXTS).encode()),
    "none.ndjson": b'{"text": 1}\n' * 3,
    "few.ndjson": b'{"text": "a"}\n',
}
CASES = {
    "text": {"sources": ["a.txt"]},
    "text, in documents": {"sources": ["a.txt"], "split": "documents", "max_document_bytes": 200},
    "texts of a glob": {"sources": ["*.txt"], "val_fraction": 0.2},
    "texts with a border in a character": {"sources": ["accents.txt"], "max_document_bytes": 64},
    "lines": {"sources": ["a.jsonl"]},
    "lines with another field": {"sources": ["body.ndjson"], "text_field": "body"},
    "lines of which some are unusable": {"sources": ["bad.jsonl"], "max_rejected_fraction": 0.2},
    "long lines": {"sources": ["long.jsonl"], "max_document_bytes": 512},
    "lines twice": {"sources": ["twice.jsonl"]},
    "lines twice, each once": {"sources": ["twice.jsonl"], "deduplicate": True},
    "rows": {"sources": ["rows.parquet"]},
    "gzip": {"sources": ["packed.jsonl.gz"]},
    "zstd": {"sources": ["packed.txt.zst"]},
    "weights": {"sources": ["*.jsonl", "b.txt"], "weights": [3, 1], "max_rejected_fraction": 0.2},
    "all": {"sources": ["*.txt", "*.jsonl", "rows.parquet", "packed.*"], "max_rejected_fraction": 0.2},
    "bpe of text": {"sources": ["a.txt"], "tokenizer": "bpe:360"},
    "bpe of lines": {"sources": ["a.jsonl", "rows.parquet"], "tokenizer": "bpe:300"},
    "bpe of a part": {"sources": ["a.jsonl"], "tokenizer": "bpe:300", "tokenizer_bytes": 3000},
    **{kind: {"sources": ["a.jsonl"], "tokenizer": f"{kind}.json"} for kind in KINDS},
    "Llama 2, text": {"sources": ["a.txt"], "tokenizer": "Llama 2.json", "max_document_bytes": 300},
}
IDS = {
    "text": "01ea3cfedaa32e87ec640a3f549a0ac6844c412d1201c92d33d59ba3919df353",
    "text, in documents": "01fcf2d9dd3450b7075e8b83481ebbf6d0e1ed46edffd4cb0caf55958d224e53",
    "texts of a glob": "c32a83205974039314c2f36b957aaf673738b77955c28fed3e6cab19a7f76287",
    "texts with a border in a character": "655309d865b0401139f83e8e6094bb48b1add70676428477b7e0c88dc6a7e2eb",
    "lines": "0dd8209644cd8c677b44ae3859d0957ed122b7df5c4dd9680555cc81b1383f3a",
    "lines with another field": "107b90c652802ecae0e76834fd12415baa66d130556811f84797b78582cbebfe",
    "lines of which some are unusable": "5d2e7e4425c8039e93cd19358fa1e13dbe46970bcbaad812f26351b605eab675",
    "long lines": "06f84f44b367d6ce9af2cf3afa1a6b1dd0051a35195ebfac03fb04640712354e",
    "lines twice": "8a38741d935b880ce0885913551f58790ddd474f2b8103868003142347e2232b",
    "lines twice, each once": "af93e5fa06b31a27ceca3a359e6d2b53907a60091eadb32570e411522cd0c378",
    "rows": "bd85e1612a792196aac87614f28f34eac5527ca900a80da83ff243e477fd196f",
    "gzip": "3b05de97bf6ed2b7b900386524e1afdc930bf44a8fac3ed3ae1b1c55aea582a5",
    "zstd": "7256fe46c41614569a551eec2e5cc57d5bcf2a22eafff24fc38cad6a1b29cba2",
    "weights": "37a2e0e4e5e8b5a6ebaf209f5c8ccec45a9b4dd4caf7f556acd3b3b25764775e",
    "all": "e59f50d266b78717921189aec26ed472e1f1ce77291a8e88f1e4d2391a730e2a",
    "bpe of text": "37d260be0e4eb7465c42fb20cbdd69acba83656504f803a5eb8ab1d87aa53532",
    "bpe of lines": "b85cc6b981192fa46222bb26d23a243dd0c2e4e68aa574906aef4b174b685c93",
    "bpe of a part": "1981f4707f147d9cae55a047926884d5740ec2c64e631112a521f1626422790e",
    "a byte-level BPE": "1e477b8212e0be30c22106d16fcc3abb0bef325203b138d71a80573628058d11",
    "Llama 3": "ebbab00885449cf377e467bb455419b4a92566ea3b245bc0be173a265e8abf19",
    "Llama 2": "3914be42704435479458f9226b40da0e8583b157b9f6e106bc75c2360e132f83",
    "Mistral": "14a236dda9ad0b2b6da61ba493c8eb494f38fbed3a0d72454d9059731281c486",
    "Gemma": "aa82c90368fa3210541c6949c92175285b4d6a26f4617b72da6dcdde29f3c33c",
    "a Unigram": "6c05e2920314c0867f58429a6f779c026bf86cadf3c3c52fd308a3049e7b71d2",
    "a WordPiece": "23afd14f877c36de8bfb135dbcecfe90d8f1665aabb0ebc0c6ed1f772fe68746",
    "a WordLevel": "9ce48cd3d09ada9195f891b4f74320e53d9640f8760db73f0ba478bddaf95e7e",
    "single characters": "a4757ce43b918b9315904da3c9b0b29efc64f2dac6f98a45d1cd1aef792c33a8",
    "single characters, as a BPE": "ef5207514e6cd478a5c32f6fb3ff1ef987aed3f215c5074f93f9ac75036c07fc",
    "Llama 2, text": "b0ca2c8211ceaffd09781517f5ad2ce6f8449170c6842c4a712619986dd75aea",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    for name, make in KINDS.items():
        (folder / f"{name}.json").write_text(json.dumps(make()), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_correctly_keeps_its_snapshot_id(case: str, folder: Path) -> None:
    data = DataConfig.model_validate({"tokenizer": "bytes", **CASES[case]})
    assert build_snapshot(MemoryStore(), data, folder).snapshot_id == IDS[case]


REFUSED = {
    "one line too many": {"sources": ["bad.jsonl", "a.jsonl"]},
    "no text": {"sources": ["none.ndjson"], "max_rejected_fraction": 1.0},
    "nothing held out": {"sources": ["few.ndjson"]},
}
GIVEN = {name: case for name, case in CASES.items() if "tokenizer" not in case} | REFUSED


@contextmanager
def one_pass() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_build, "FAST_FROM_BYTES", 0)
        patch.setattr(snapshot_build, "EncodingProcess", FastEncoder)
        patch.setattr(tokenizer, "_every_character", lambda: iter(()))
        yield


def outcome(data: DataConfig, folder: Path, stages: set[BuildStage]) -> str:
    def listen(progress: BuildProgress) -> None:
        stages.add(progress.stage)

    try:
        return build_snapshot(MemoryStore(), data, folder, on_progress=listen).snapshot_id
    except InvalidCorpus as refused:
        return str(refused)


@pytest.mark.parametrize("case", GIVEN)
def test_one_pass_gives_what_a_survey_and_a_pass_give(case: str, folder: Path) -> None:
    data = DataConfig.model_validate({"tokenizer": "bytes", **GIVEN[case]})
    stages = set[BuildStage]()
    expected = outcome(data, folder, stages)
    assert BuildStage.SURVEYING in stages and (case in REFUSED) == (len(expected) != 64)
    stages.clear()
    with one_pass():
        assert outcome(data, folder, stages) == expected
    assert BuildStage.SURVEYING not in stages and BuildStage.TOKENIZING in stages
