"""Says how much of the data is held out, and warns where that is far from the share that was asked for."""

_FAR = 1.5
"""How many times more, or less, than asked is told: one long document can be most of a text."""


def describe_split(train: int, val: int, unit: str, val_fraction: float) -> str:
    """Return the sizes of both splits in `unit`, with a warning where the share held out is far off."""
    sizes = f"{train:,} {unit} to train on, {val:,} held out"
    share = val / max(1, train + val)
    if val_fraction / _FAR <= share <= val_fraction * _FAR:
        return sizes
    return (
        f"{sizes}; warning: that is {share:.1%}, not data.val_fraction = {val_fraction:g}, because each document goes "
        "by its own hash and few are long: lower data.max_document_bytes, or set data.split = 'end'"
    )
