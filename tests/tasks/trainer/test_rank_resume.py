"""Any number of ranks resumes from any checkpoint; together they read it once, each into memory for its part alone."""

from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed import DistNetworkError

from cairn.model.configuration.network import ModelConfig
from cairn.model.training.parallel import Ranks
from cairn.model.training.train_state import TrainState
from cairn.storage.stores.local_store import LocalStore
from cairn.tasks.trainer.training_setup import CheckpointLoad
from tests.flipped_bit import flip_file
from tests.tasks.rank_resume import CPU, VOCABULARY, Mode, resume_by, stage_by_one, training

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=10, block_size=8)
"""Its rows do not divide by the number of ranks."""
MIDDLE = ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=4)
"""Its positions are rows of two of three ranks."""
LARGE = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


@pytest.mark.parametrize(  # quicker for shards: the test of what a sharded rank receives has the whole state's digests
    ("size", "mode"), [(2, "ddp"), *(pytest.param(3, mode, marks=pytest.mark.slow) for mode in ("fsdp", "ddp"))]
)
def test_ranks_resume_with_the_bits_that_one_process_staged(tmp_path: Path, size: int, mode: Mode) -> None:
    reference, digest, _ = stage_by_one(tmp_path, SMALL)
    for said in resume_by(size, mode, tmp_path, SMALL, reference):
        assert (said["promised"], said["found"]) == (digest, digest)


def test_replicated_ranks_read_a_checkpoint_once_between_them(tmp_path: Path) -> None:
    reference, _, state_bytes = stage_by_one(tmp_path, MIDDLE)
    reads = [said["read"] for said in resume_by(3, "ddp", tmp_path, MIDDLE, reference)]
    assert sum(reads) <= 1.05 * state_bytes  # some headers of shards are read by two
    assert max(reads) <= state_bytes / 2


class PeerCannotRead(Ranks):
    """Rank 0 of two, whose other one fails before it has read its tensors."""

    def any(self, flag: bool) -> bool:
        """Lose the peer, as the collective call does."""
        raise DistNetworkError("Connection closed by peer")

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Never comes to its turn."""
        pytest.fail("a tensor was exchanged although not every rank has read its own")


def test_no_tensor_is_exchanged_before_every_rank_has_read_its_own(tmp_path: Path) -> None:
    reference, _, _ = stage_by_one(tmp_path, SMALL)
    load = CheckpointLoad(LocalStore(tmp_path), reference)
    state = TrainState.create(SMALL, training(), VOCABULARY, CPU, PeerCannotRead(0, 2), filled=False)
    with pytest.raises(DistNetworkError):
        load.into(state)


@pytest.mark.parametrize("finder", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_replicated_rank_that_finds_a_damaged_chunk_names_it_and_the_other_only_loses_a_peer(
    tmp_path: Path, finder: int
) -> None:
    reference, _, _ = stage_by_one(tmp_path, SMALL)
    shard = tmp_path / reference.prefix / f"{('weights', 'optimizer')[finder]}-00001-of-00001.safetensors"
    flip_file(shard, -1)
    said = resume_by(2, "ddp", tmp_path, SMALL, reference)
    assert f"{reference.prefix}/{shard.name}: sha256 is" in said[finder]["error"]
    assert not said[finder]["peer_is_gone"] and said[1 - finder]["peer_is_gone"]


@pytest.mark.linux  # reads /proc
def test_a_sharded_rank_that_copies_its_share_of_a_checkpoint_receives_no_more_than_it_keeps(tmp_path: Path) -> None:
    reference, digest, state_bytes = stage_by_one(tmp_path, MIDDLE)
    ranks = resume_by(3, "fsdp", tmp_path, MIDDLE, reference)
    assert {said["found"] for said in ranks} == {digest}
    assert {name: digest for said in ranks for name, digest in said["kept"].items()} == ranks[0]["whole"]
    for said in ranks:
        assert 0 < said["received"] <= state_bytes / 3


@pytest.mark.slow  # quicker: the tests above, and test_staging_buffer.py for the memory of one process
@pytest.mark.linux  # reads /proc
@pytest.mark.parametrize(("size", "mode", "parts"), [(2, "fsdp", 2), (4, "fsdp", 4), (2, "ddp", 1)])
def test_a_resume_takes_the_memory_of_a_ranks_part_and_half_a_gigabyte(
    tmp_path: Path, size: int, mode: Mode, parts: int
) -> None:
    reference, digest, state_bytes = stage_by_one(tmp_path, LARGE)
    for said in resume_by(size, mode, tmp_path, LARGE, reference):
        assert said["found"] == digest
        assert said["peak"] <= state_bytes / parts + 512e6
        print(f"{size} ranks: {said['peak'] / 1e6:,.0f} MB of a state of {state_bytes / 1e6:,.0f} MB")
