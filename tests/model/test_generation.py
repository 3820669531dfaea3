"""Sampling from a model."""

import pytest
import torch

from model.errors import InvalidInput
from model.generation import generate


def test_equal_seeds_give_equal_text(tiny_run):
    model = tiny_run(model={"dropout": 0.5}).state.model
    assert generate(model, [1], new_tokens=20, seed=4) == generate(model, [1], new_tokens=20, seed=4)


def test_another_seed_gives_another_text(tiny_run):
    model = tiny_run().state.model
    assert generate(model, [1], new_tokens=20, seed=4) != generate(model, [1], new_tokens=20, seed=5)


def test_text_may_grow_longer_than_the_block(tiny_run):
    assert len(generate(tiny_run().state.model, range(12), new_tokens=20)) == 20


def test_only_the_last_block_of_the_prompt_counts(tiny_run):
    model = tiny_run().state.model
    long, short = [3, 1, 4, 1, 5, *range(8)], list(range(8))
    assert generate(model, long, new_tokens=6, seed=1) == generate(model, short, new_tokens=6, seed=1)


def test_temperature_zero_is_the_likeliest_token_whatever_the_seed(tiny_run):
    model = tiny_run().state.model
    greedy = [generate(model, [2], new_tokens=9, temperature=0.0, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == generate(model, [2], new_tokens=9, top_k=1)


def test_generating_leaves_mode_and_process_generator_alone(tiny_run):
    model = tiny_run(model={"dropout": 0.5}).state.model.train()
    before = torch.get_rng_state()
    generate(model, [0], new_tokens=4)
    assert model.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "prompt_ids is empty"),
        ([61], {}, r"\[0, 61\)"),
        ([0], {"temperature": -1.0}, "temperature=-1.0"),
        ([0], {"top_k": 0}, "top_k=0"),
    ],
)
def test_impossible_requests_are_refused(tiny_run, prompt, settings, words):
    with pytest.raises(InvalidInput, match=words):
        generate(tiny_run().state.model, prompt, new_tokens=3, **settings)


def test_a_network_that_masks_documents_writes_on_from_the_last_one_alone(tiny_run):
    model = tiny_run().state.model
    model.boundary_id = 7
    ids = [generate(model, [*before, 7, 3], new_tokens=2, seed=1) for before in ([1, 2, 4], [5, 6, 8])]
    assert ids[0] == ids[1]
