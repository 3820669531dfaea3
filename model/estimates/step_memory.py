"""What a trainer holds at once beside weights and optimizer moments, from shapes alone. Imports no torch.

A moment is a list of pieces; a step's follow layers, head and gradient sum, a held-out loss's are evaluators' too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from cairn.model.configuration.network import ModelConfig
from cairn.model.configuration.parameter_table import WIDENED, layer_matrices
from cairn.model.configuration.training import TrainingConfig
from cairn.model.kernels.block_sizes import (
    DEVICE_HEAD_CHUNK_BYTES,
    HEAD_CHUNK_BYTES,
    HELD_OUT_CHUNK_BYTES,
    HELD_OUT_TOKENS,
    WIDEST_FLASH_HEAD,
    fits_flash,
    saved_probabilities,
)

FP32_BYTES, HALF_BYTES = 4, 2
_MULTIPROCESSORS = 132
"""Those of an H100: flash attention's deterministic backward pass has a sum of queries' gradients for each."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one purpose at one moment, allocated in blocks of `block_bytes`."""

    part: str
    bytes: int
    block_bytes: int


class StepMemory:
    """The memory of one micro-batch besides weights and optimizer moments."""

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        vocab_size: int,
        windows: int,
        recompute: bool,
        *,
        parameters: int,
        on_cuda: bool,
        shards: int,
    ) -> None:
        self.model, self.vocab_size, self.windows, self.recompute = model, vocab_size, windows, recompute
        self.parameters, self.on_cuda, self.shards = parameters, on_cuda, shards
        self.is_fused = training.kernels == "fused"
        self.is_half = training.precision != "fp32"
        self.is_block_fused = self.is_fused and training.precision == "bf16" and not (on_cuda or training.compile)
        by_bounds = self.is_half and on_cuda and fits_flash(model.head_size) and not training.compile
        self.has_mask = training.mask_documents and not by_bounds
        # PyTorch's math kernel, which keeps all probabilities, in fp32.
        self.is_math = bool(model.dropout) and not (on_cuda or self.is_block_fused)
        if on_cuda:
            self.is_math = not self.is_half or model.head_size > WIDEST_FLASH_HEAD or self.has_mask
        self.number = HALF_BYTES if self.is_half else FP32_BYTES
        self.table = vocab_size * model.n_embd
        self.positions = windows * model.block_size
        self.fp32 = FP32_BYTES * self.positions * model.n_embd
        self.computed = self.number * self.positions * model.n_embd
        self.attention = self.number * self.positions * model.attention_width
        self.inner = self.number * self.positions * model.n_inner
        self.pairs = windows * model.n_head * model.block_size**2

    def moments(self, *, sums: int) -> Iterator[list[Piece]]:
        """Yield the pieces at the head, at the start of the backward pass, and at its end, beside so many gradients."""
        table = FP32_BYTES * self.table
        earlier = list(self._gradients()) * sums
        saved = [*self._half_weights(), *self._gathered(), *self._activations()]
        yield [*earlier, *saved, *self._head()]
        # Embedding and head share one table: each makes a gradient of it before the two are added.
        head_gradients = [Piece("gradients", table * (2 if self.is_fused else 1), table)]
        if self.is_fused:
            head_gradients.append(Piece("logits", 2 * self.fp32, self.fp32))
        # The gradients between the parts of a layer.
        between = [Piece("activations", 2 * self.fp32, self.fp32)]
        between.append(Piece("activations", 2 * WIDENED[self.model.feed_forward] * self.inner, self.inner))
        if self.is_math:
            between.append(Piece("activations", 2 * FP32_BYTES * self.pairs, FP32_BYTES * self.pairs))
        elif self.on_cuda:
            each = ceil(_MULTIPROCESSORS / (self.windows * self.model.n_head)) * self.fp32
            between.append(Piece("activations", each, each))
        yield [*earlier, *saved, *head_gradients, *between]
        others = list(self._gradients()) * max(sums - 1, 0)  # the newest sum is added to in place
        last = list(self._gradients(shards=1 if sums else self.shards))
        yield [*last, *others, *self._gathered(), Piece("gradients", table * (2 if sums else 1), table)]

    def _gradients(self, *, shards: int = 1) -> Iterator[Piece]:
        """Yield whole gradients; of several shards only that of the table is whole, which is the last to be made.

        Sharded processes keep whole ones too until the step's last micro-batch.
        """
        rest = self.parameters - self.table
        yield Piece("gradients", FP32_BYTES * self.table, FP32_BYTES * self.table)
        yield Piece("gradients", FP32_BYTES * rest // shards, FP32_BYTES * self.model.n_inner * self.model.n_embd)

    def _gathered(self) -> Iterator[Piece]:
        """Yield what a sharded process has gathered: the table, and two layers and their gradients with buffers."""
        if self.shards > 1:
            matrices = layer_matrices(self.model)
            yield Piece("parameters", FP32_BYTES * self.table, FP32_BYTES * self.table)
            yield Piece("parameters", 2 * 2 * self.number * matrices, self.number * matrices)
            yield Piece("gradients", 2 * FP32_BYTES * matrices, FP32_BYTES * matrices)

    def _half_weights(self) -> Iterator[Piece]:
        if self.is_half:
            layers = 1 if self.recompute and self.is_block_fused else self.model.n_layer
            layers = layers if self.shards == 1 else 0  # gathered in half precision
            matrices = layer_matrices(self.model)
            yield Piece("parameters", HALF_BYTES * layers * matrices, HALF_BYTES * matrices // 3)
            if not self.is_fused:
                yield Piece("parameters", HALF_BYTES * self.table, HALF_BYTES * self.table)

    def _activations(self) -> Iterator[Piece]:
        full = 1 if self.recompute else self.model.n_layer
        for piece in self._layer():
            yield Piece("activations", full * piece.bytes, piece.block_bytes)
        if self.recompute:
            yield Piece("activations", self.model.n_layer * self.fp32, self.fp32)
        if self.has_mask:  # of bools
            yield Piece("activations", self.pairs // self.model.n_head, self.pairs // self.model.n_head)
        # The last norm's input and output, and dropout after the embedding.
        last = self.fp32 + self.computed + (self.fp32 if self.model.dropout else 0)
        yield Piece("activations", last, self.fp32)

    def _layer(self) -> Iterator[Piece]:
        yield Piece("activations", 2 * self.fp32, self.fp32)  # the inputs of the two norms
        yield Piece("activations", 2 * self.computed + 4 * self.attention, self.computed)  # norms, q, k, v, mixed
        # Both sides of the function; of SwiGLU gate, the other half, their product and, by autograd, the gate's SiLU.
        widened = WIDENED[self.model.feed_forward]
        yield Piece("activations", (widened + (1 if self.is_block_fused else widened)) * self.inner, self.inner)
        yield from self._norms()
        time, dropout = self.model.block_size, self.model.dropout
        if dropout:
            yield Piece("activations", 2 * self.computed, self.computed)
        # What attention keeps for the backward pass besides queries, keys, values and its result.
        if self.is_block_fused:
            kept = HALF_BYTES * saved_probabilities(time) * self.windows * self.model.n_head * (2 if dropout else 1)
            yield Piece("activations", kept, kept // 4)
        elif self.is_math:  # with dropout also what it draws, a bool on CUDA, and its result
            dropped = FP32_BYTES + (1 if self.on_cuda else FP32_BYTES) if dropout else 0
            yield Piece("activations", (FP32_BYTES + dropped) * self.pairs, FP32_BYTES * self.pairs)
            yield Piece("activations", 3 * (self.fp32 - self.computed), self.fp32)
        elif self.has_mask:  # as numbers
            yield Piece("activations", self.number * self.pairs // self.model.n_head, self.pairs)

    def _norms(self) -> Iterator[Piece]:
        """What norms keep besides their inputs and results."""
        if self.is_block_fused:
            if self.model.qk_norm:  # queries and each head's keys before
                yield Piece("activations", 2 * self.attention, 2 * self.attention)
            return
        if self.model.norm == "rms" and self.model.norm_gain:  # the normalised values before their gain
            yield Piece("activations", 2 * self.fp32, self.fp32)
        heads = self.positions * (self.model.attention_width + self.model.key_width)
        if self.model.qk_norm or self.model.positions == "rotary":  # beside the joint product, which holds the values
            yield Piece("activations", self.number * heads, self.number * heads)
        if self.model.qk_norm:  # queries and keys in fp32, where they are not so anyway, and before their gain
            yield Piece("activations", FP32_BYTES * heads * (self.is_half + self.model.norm_gain), FP32_BYTES * heads)

    def _head(self) -> Iterator[Piece]:
        if not self.is_fused:
            logits = FP32_BYTES * self.positions * self.vocab_size
            yield Piece("logits", 3 * logits, logits)  # log-softmax, gradient of the losses, that of the logits
            return
        table, number = self.table, self.number
        yield Piece("logits", self.fp32, self.fp32)
        yield Piece("gradients", FP32_BYTES * table, FP32_BYTES * table)
        share = FP32_BYTES if self.on_cuda else number
        yield Piece("gradients", share * table, share * table)
        if self.is_half or self.on_cuda:
            yield Piece("logits", number * table, number * table)
        size = DEVICE_HEAD_CHUNK_BYTES // number if self.on_cuda else HEAD_CHUNK_BYTES // FP32_BYTES
        rows = min(self.positions, max(1, size // self.vocab_size))
        each, largest = (FP32_BYTES, number)  # one buffer; a product in half precision makes a reordered copy
        if self.on_cuda:
            each, largest = 3 * number + 2 * FP32_BYTES, FP32_BYTES
        yield Piece("logits", each * rows * self.vocab_size, largest * rows * self.vocab_size)


def held_out_moments(model: ModelConfig, vocab_size: int, *, on_cuda: bool, is_masked: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of a held-out loss in a layer and at the head, and of a sample: in fp32, without gradients."""
    windows = max(1, HELD_OUT_TOKENS // model.block_size)
    fp32 = FP32_BYTES * windows * model.block_size * model.n_embd
    pairs = windows * model.n_head * model.block_size**2
    inner = WIDENED[model.feed_forward] * FP32_BYTES * windows * model.block_size * model.n_inner
    layer = [Piece("activations", 3 * fp32 + 2 * inner, inner)]  # residual stream, a norm, the feed-forward part
    if on_cuda:  # the math kernel: scores, probabilities, and where they are to be 0
        layer = [Piece("activations", 9 * fp32 + (3 * FP32_BYTES + 1) * pairs, FP32_BYTES * pairs)]
    if is_masked:
        layer.append(Piece("activations", (1 + FP32_BYTES) * pairs // model.n_head, FP32_BYTES * pairs // model.n_head))
    yield layer
    rows = min(windows * model.block_size, max(1, HELD_OUT_CHUNK_BYTES // (FP32_BYTES * vocab_size)))
    chunk = FP32_BYTES * rows * vocab_size
    yield [Piece("activations", 2 * fp32, fp32), Piece("logits", 2 * chunk, chunk)]
    cache = 2 * FP32_BYTES * model.n_layer * model.block_size * model.key_width
    yield [Piece("activations", cache, cache)]
