"""Which documents are held out: a pure function of a document's own content, so no other document can move it.

Owns the split rule. Refuses to know files, tokens and order. Hashing content instead of drawing lots is the usual
remedy for train/test leakage under a growing corpus (A. Géron, Hands-On Machine Learning, chapter 2).
"""

from enum import StrEnum

from tasks.data.document import InvalidCorpus


class Split(StrEnum):
    """The side of the fence a document lies on."""

    TRAIN = "train"
    VAL = "val"


def split_of(content_sha256: str, val_fraction: float) -> Split:
    """Return the split of the document whose UTF-8 text has this sha256 (hex).

    Equal texts always fall together, and a greater fraction only ever moves documents from train to val.
    """
    # Python compares int with float exactly, so no rounding can make two machines disagree.
    drawn = int(content_sha256[:16], 16)
    return Split.VAL if drawn < val_fraction * 2.0**64 else Split.TRAIN


def require_both_splits(train_documents: int, val_documents: int, val_fraction: float) -> None:
    """Refuse a corpus that leaves a split empty (InvalidCorpus), saying what to change."""
    if train_documents and val_documents:
        return
    empty, remedy = (Split.VAL, "raise") if train_documents else (Split.TRAIN, "lower")
    raise InvalidCorpus(
        f"data.val_fraction = {val_fraction}: none of the {train_documents + val_documents} documents fell into the "
        f"{empty} split; rule: train and val each need at least one document. Add text, or {remedy} "
        "data.val_fraction, or name a file by its path instead of by a glob: its blank-line-separated blocks are "
        "then the documents"
    )
