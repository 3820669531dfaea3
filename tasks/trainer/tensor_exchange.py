"""Converts torch tensors to storage's tensor records and back, without a copy where possible."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cairn.model.training import sharded_tensors, train_state
from cairn.storage.checkpoints import checkpoint, checkpoint_shard, payload

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_record(name: str, tensor: Tensor) -> payload.TensorRecord:
    """Return a view of a contiguous host tensor's bytes as a record."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # (bytes,)
    return payload.TensorRecord(
        name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=memoryview(data.data)
    )


def to_group(name: str, tensors: Iterable[train_state.NamedTensor]) -> checkpoint.TensorGroup:
    """Return the tensors of the group `name` as one shard group."""
    own = (item for item in tensors if item.group == name)
    return checkpoint.TensorGroup(name=name, records=tuple(to_record(item.name, item.tensor) for item in own))


def wanted_bytes(named: train_state.NamedTensor) -> checkpoint_shard.WantedBytes:
    """Return which bytes of a stored tensor this process needs: they go straight into `named`, or to its device."""
    local, first_row = sharded_tensors.local_rows(named.tensor)
    flat = local.detach().reshape(-1).view(torch.uint8)  # its shape -> (bytes,)
    begin = first_row * (named.tensor.nbytes // max(1, named.tensor.shape[0])) if first_row else 0
    part = checkpoint_shard.WantedBytes(name=named.name, begin=begin, end=begin + flat.nbytes)
    if flat.device.type == "cpu":
        return replace(part, memory=memoryview(flat.numpy().data))

    def take(start: int, data: memoryview) -> None:
        flat[start : start + data.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))

    return replace(part, take=take)


def without_values(tensors: Iterable[payload.TensorDigest]) -> dict[str, Tensor]:
    """Return tensors that have names, shapes and dtypes only."""
    return {item.name: torch.empty(item.shape, dtype=DTYPES[item.dtype], device="meta") for item in tensors}


def to_tensors(records: Iterable[payload.TensorRecord]) -> dict[str, Tensor]:
    """Return the records as tensors, by name: views of the records' memory, or copies if it is read-only."""
    return {record.name: _to_tensor(record) for record in records}


def _to_tensor(record: payload.TensorRecord) -> Tensor:
    dtype = DTYPES[record.dtype]
    if not record.data.nbytes:
        return torch.empty(record.shape, dtype=dtype)
    data = bytearray(record.data) if record.data.readonly else record.data
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(record.shape)  # (bytes,) to its shape
