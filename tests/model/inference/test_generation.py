"""Sampling from a model, and text that is shown while it is drawn."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from cairn.model.architectures.gpt import GPT
from cairn.model.configuration.network import ModelConfig
from cairn.model.data.tokenizer import Tokenizer
from cairn.model.errors import InvalidInput, ModelError
from cairn.model.inference.prediction import Sampling, TextStream, evaluation_mode, generate_stream
from cairn.model.kernels.attention import KeyValueCache
from tests.model.tiny_run import TinyRun

VOCAB, END = 61, 7
NETWORKS = {"gpt2": {}, "qwen3": {"architecture": "qwen3", "n_kv_head": 1}}
both = pytest.mark.parametrize("shape", NETWORKS.values(), ids=NETWORKS)


def generate(model, prompt, *, new_tokens, seed=0, **settings):
    """The ids that follow the prompt."""
    return list(generate_stream(model, prompt, new_tokens=new_tokens, sampling=Sampling(**settings), seed=seed))


def test_equal_seeds_give_equal_text() -> None:
    model = TinyRun(model={"dropout": 0.5}).state.model
    assert generate(model, [1], new_tokens=20, seed=4) == generate(model, [1], new_tokens=20, seed=4)


def test_another_seed_gives_another_text() -> None:
    model = TinyRun().state.model
    assert generate(model, [1], new_tokens=20, seed=4) != generate(model, [1], new_tokens=20, seed=5)


@both
def test_text_may_grow_longer_than_the_block(shape) -> None:
    assert len(generate(TinyRun(model=shape).state.model, range(12), new_tokens=20)) == 20


@both
def test_only_the_last_block_of_the_prompt_counts(shape) -> None:
    model = TinyRun(model=shape).state.model
    long, short = [3, 1, 4, 1, 5, *range(8)], list(range(8))
    assert generate(model, long, new_tokens=6, seed=1) == generate(model, short, new_tokens=6, seed=1)


def test_temperature_zero_is_the_likeliest_token_whatever_the_seed() -> None:
    model = TinyRun().state.model
    greedy = [generate(model, [2], new_tokens=9, temperature=0.0, seed=seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == generate(model, [2], new_tokens=9, top_k=1)


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "prompt_ids is empty"),
        ([61], {}, r"\[0, 61\)"),
        ([0], {"temperature": -1.0}, "temperature=-1.0"),
        ([0], {"top_k": 0}, "top_k=0"),
        ([0], {"temperature": float("nan")}, "temperature=nan"),
        ([0], {"top_p": 0.0}, "top_p=0.0"),
        ([0], {"top_p": 1.1}, "top_p=1.1"),
        ([0], {"top_p": float("nan")}, "top_p=nan"),
    ],
)
def test_impossible_requests_are_refused_before_the_first_token(prompt, settings, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        generate_stream(TinyRun().state.model, prompt, new_tokens=3, sampling=Sampling(**settings))


def test_fewer_than_no_tokens_are_refused() -> None:
    with pytest.raises(InvalidInput, match="new_tokens=-1"):
        generate_stream(TinyRun().state.model, [0], new_tokens=-1, sampling=Sampling())


@both
def test_a_network_that_masks_documents_continues_the_last_document_alone(shape) -> None:
    model = TinyRun(model=shape).state.model
    model.boundary_id = 7
    ids = [generate(model, [*before, 7, 3], new_tokens=2, seed=1) for before in ([1, 2, 4], [5, 6, 8])]
    assert ids[0] == ids[1]


def network(block_size=32, boundary_id=None, **more):
    """A network with scores far enough apart that rounding does not choose the token."""
    torch.manual_seed(3)
    model = GPT(ModelConfig(**{"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": block_size, **more}), VOCAB)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.boundary_id = boundary_id
    return model.eval()


def text(length, *ends):
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    ids[ids == END] = END + 1
    ids[:, list(ends)] = END
    return ids


@both
def test_a_forgotten_text_leaves_nothing_behind(shape) -> None:
    model = network(**shape)
    cache = KeyValueCache(model.config, device=model.device)
    with torch.no_grad():
        model.extend(text(32), cache)
        cache.length = 0
        torch.testing.assert_close(model.extend(text(9, 4), cache)[0], model(text(9, 4))[0, -1], atol=1e-5, rtol=0)


@both
def test_a_text_longer_than_the_block_is_refused_and_the_cache_stays_as_it_was(shape) -> None:
    model = network(**shape)
    cache = KeyValueCache(model.config, device=model.device)
    with torch.no_grad():
        model.extend(text(30), cache)
        with pytest.raises(InvalidInput, match=r"33 tokens.*block_size=32"):
            model.extend(text(3), cache)
    assert cache.length == 30


@both
@pytest.mark.parametrize("boundary_id", [None, END])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.8, top_k=20)])
def test_within_a_block_the_stream_equals_full_passes(shape, sampling, boundary_id) -> None:
    model = network(boundary_id=boundary_id, **shape)
    ids, generator = [5, END, 3], torch.Generator().manual_seed(2)
    stream = generate_stream(model, ids, new_tokens=29, sampling=sampling, seed=2)
    with torch.no_grad():
        for token in stream:
            assert token == sampling.sample(model(torch.tensor([ids]))[0, -1], generator)
            ids = [*ids, token]
    assert len(ids) == 32


@both
@pytest.mark.parametrize("boundary_id", [None, END])
@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_beyond_the_block_the_stream_continues_from_the_newest_half(shape, block_size, boundary_id) -> None:
    model, prompt = network(block_size, boundary_id, **shape), [1, 2, END, 3, 9, 4, 12, 30, 8]
    expected, seen = [], prompt[-block_size:]
    with torch.no_grad():
        for _ in range(24):
            seen = seen if len(seen) <= block_size else seen[-max(block_size // 2, 1) :]
            expected.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
            seen = [*seen, expected[-1]]
    assert list(generate_stream(model, prompt, new_tokens=24, sampling=Sampling(temperature=0))) == expected


def test_the_stream_draws_each_token_on_demand() -> None:
    model = TinyRun().state.model
    asked = generate_stream(model, [1], new_tokens=10**9, sampling=Sampling(), seed=4)
    assert list(islice(asked, 20)) == list(generate_stream(model, [1], new_tokens=20, sampling=Sampling(), seed=4))


def test_between_two_tokens_of_a_stream_the_network_keeps_its_mode() -> None:
    model, before = TinyRun(model={"dropout": 0.5}).state.model.train(), torch.get_rng_state()
    for _ in generate_stream(model, [0], new_tokens=3, sampling=Sampling()):
        assert model.training and torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def drawn(chances, sampling, *, times=400):
    logits, generator = torch.tensor(chances).log(), torch.Generator().manual_seed(0)
    return {sampling.sample(logits, generator) for _ in range(times)}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, {1}), (0.39, {1}), (0.45, {1, 3}), (0.75, {1, 3, 0}), (0.99, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_the_nucleus_is_the_fewest_likeliest_tokens_that_hold_top_p(top_p, kept) -> None:
    assert drawn([0.2, 0.4, 0.1, 0.3], Sampling(top_p=top_p)) == kept


def test_equally_likely_tokens_do_not_all_enter_the_nucleus() -> None:
    assert drawn([0.25] * 4, Sampling(top_p=0.5)) == {0, 1}


def test_the_nucleus_is_taken_after_top_k() -> None:
    assert drawn([0.2, 0.4, 0.1, 0.3], Sampling(top_k=2, top_p=0.57)) == {1}  # 0.4 of 0.7 left


def test_a_flat_temperature_widens_the_nucleus() -> None:
    sharp, flat = Sampling(temperature=0.5, top_p=0.5), Sampling(temperature=100.0, top_p=0.5)
    assert len(drawn([0.2, 0.4, 0.1, 0.3], sharp)) < len(drawn([0.2, 0.4, 0.1, 0.3], flat))


def test_a_temperature_next_to_zero_takes_the_likeliest_token() -> None:
    assert drawn([0.2, 0.4, 0.1, 0.3], Sampling(temperature=1e-40)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_network_generates_nothing(temperature) -> None:
    model = TinyRun().state.model
    with torch.no_grad():
        model.wte.weight[3, 0] = float("nan")
    with pytest.raises(ModelError, match="diverged"), evaluation_mode(model):
        next(generate_stream(model, [3], new_tokens=1, sampling=Sampling(temperature=temperature)))


BYTES = Tokenizer.bytes()


def streamed(tokenizer, ids, after=()):
    stream = TextStream(tokenizer.decode, after)
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.lists(st.integers(0, 256), max_size=40))
def test_whatever_the_bytes_the_pieces_joined_are_the_text_decoded_at_once(ids) -> None:
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


@given(st.text(max_size=20), st.text(max_size=20))
def test_after_a_prompt_the_pieces_are_the_text_alone(prompt, text) -> None:
    after, ids = BYTES.encode_batch([prompt, text])
    assert "".join(streamed(BYTES, ids, after)) == text


@pytest.mark.parametrize("text", ["naïve", "€", "日本語", "🪨 stone", "e\u0301"])
def test_a_character_is_shown_whole_as_soon_as_its_last_byte_is_drawn(text) -> None:
    ids, pieces = list(text.encode()), [character for character in text]
    shown = streamed(BYTES, ids)
    assert [piece for piece in shown if piece] == pieces and shown[-1] == ""


def test_a_character_that_is_never_finished_is_shown_at_the_end() -> None:
    assert streamed(BYTES, [ord("a"), 0xE6, 0x97]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_byte_that_is_no_text_does_not_hold_back_what_follows() -> None:
    assert streamed(BYTES, [0xFF, ord("a"), ord("b")]) == ["", "\N{REPLACEMENT CHARACTER}a", "b", ""]


def test_spaces_between_tokens_are_kept_where_the_tokenizer_writes_them_only_between() -> None:
    library = Library(models.WordLevel({"</s>": 0, "▁a": 1, "▁b": 2, "c": 3}, unk_token="</s>"))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    assert "".join(streamed(tokenizer, [2, 3, 1], after=[1])) == " bc a"
    assert "".join(streamed(tokenizer, [2, 3, 1])) == tokenizer.decode([2, 3, 1]) == "bc a"
