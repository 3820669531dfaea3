"""Any number of ranks resumes from any checkpoint; each reads its own part, into memory for that part alone."""

from pathlib import Path

import pytest

from model.configuration.network import ModelConfig
from tests.tasks.rank_resume import Mode, resume_by, stage_by_one

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=10, block_size=8)
"""Its rows do not divide by the number of ranks."""
LARGE = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


@pytest.mark.parametrize(("size", "mode"), [(3, "fsdp"), pytest.param(2, "ddp", marks=pytest.mark.slow)])
def test_ranks_resume_with_the_bits_that_one_process_staged(tmp_path: Path, size: int, mode: Mode) -> None:
    reference, digest, _ = stage_by_one(tmp_path, SMALL)
    for said in resume_by(size, mode, tmp_path, SMALL, reference):
        assert (said["promised"], said["found"]) == (digest, digest)


@pytest.mark.slow  # quicker: the test above, and tests/tasks/test_staging_buffer.py for the memory of one process
@pytest.mark.linux  # reads /proc
@pytest.mark.parametrize("size", [2, 4])
def test_a_sharded_resume_takes_the_memory_of_its_part_and_half_a_gigabyte(tmp_path: Path, size: int) -> None:
    reference, digest, state_bytes = stage_by_one(tmp_path, LARGE)
    for said in resume_by(size, "fsdp", tmp_path, LARGE, reference):
        assert said["found"] == digest
        assert said["peak"] <= state_bytes / size + 512e6
        print(f"{size} ranks: {said['peak'] / 1e6:,.0f} MB of a state of {state_bytes / 1e6:,.0f} MB")
