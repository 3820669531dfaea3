"""How much a model repeats itself, written by it from its own start: an evaluator of one's own in one file.

Gets a model directory in Hugging Face layout, prints one JSON object of numbers. Cairn's own network reads the
directory back, without `transformers`.

Greedy text of a model that has learned little goes in circles. `distinct_2` is the share of its pairs of tokens that
are different ones (Li et al. 2016), `loop` the share of tokens that lie in a copy of what stood right before them.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.numpy import load_file

from cairn.model.architectures import gpt, hugging_face
from cairn.model.configuration.network import ModelConfig
from cairn.model.inference.prediction import Sampling, generate_stream

TOKENS = 128
TEXTS = 4


def read_network(folder: Path) -> tuple[gpt.GPT, int]:
    """Return the network of a model directory, and the id with which its texts begin."""
    document = (folder / "config.json").read_bytes()
    config = hugging_face.adopt_network(hugging_face.parse_config(document), ModelConfig())
    vocab_size = config.rows(1)
    weights = hugging_face.from_hugging_face(load_file(folder / "model.safetensors"), config, vocab_size)
    network = gpt.GPT(config, vocab_size)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return network.eval(), json.loads(document)["eos_token_id"]


def loop_share(ids: list[int], longest: int = 16) -> float:
    """Return the share of tokens that lie in a copy of the up to `longest` tokens right before them."""
    copied = [False] * len(ids)
    for length in range(1, longest + 1):
        for end in range(2 * length, len(ids) + 1):
            if ids[end - length : end] == ids[end - 2 * length : end - length]:
                copied[end - length : end] = [True] * length
    return sum(copied) / len(ids)


def main() -> None:
    """Print the numbers of the model in the folder that is named last."""
    network, start = read_network(Path(sys.argv[-1]))
    with torch.inference_mode():
        first = network(torch.tensor([[start]]))[0, -1]
    begins, likeliest = first.topk(min(TEXTS, len(first))).indices.tolist(), Sampling(temperature=0)
    texts = [[it, *generate_stream(network, [it], new_tokens=TOKENS, sampling=likeliest)] for it in begins]
    pairs = [set(pairwise(ids)) for ids in texts]
    numbers = {
        "distinct_2": sum(len(found) for found in pairs) / sum(len(ids) - 1 for ids in texts),
        "loop": sum(loop_share(ids) for ids in texts) / len(texts),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
