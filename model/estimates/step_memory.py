"""The memory of one micro-batch and of a held-out loss, as pieces at their fullest moments. Imports no torch.

A moment is a list of pieces; a step's follow layers, head and gradient sum, a held-out loss's are evaluators' too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from cairn.model.configuration.network import WIDENED, ModelConfig, layer_matrices
from cairn.model.configuration.training import TrainingConfig, count_trained
from cairn.model.kernels import block_sizes

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
        self.model, self.vocab_size = model, (vocab_size := model.rows(vocab_size))
        self.windows, self.recompute = windows, recompute
        self.parameters, self.on_cuda, self.shards = parameters, on_cuda, shards
        self.is_fused = training.kernels == "fused"
        self.is_half = training.precision != "fp32"
        self.lora, plain = training.lora, on_cuda or training.compile or training.lora is not None
        self.is_block_fused = self.is_fused and training.precision == "bf16" and not plain
        by_bounds = self.is_half and on_cuda and block_sizes.fits_flash(model.head_size) and not training.compile
        self.has_mask = training.mask_documents and not by_bounds
        # PyTorch's math kernel, which keeps all probabilities, in fp32.
        self.is_math = bool(model.dropout) and not (on_cuda or self.is_block_fused)
        if on_cuda:
            self.is_math = not self.is_half or model.head_size > block_sizes.WIDEST_FLASH_HEAD or self.has_mask
        self.number = HALF_BYTES if self.is_half else FP32_BYTES
        self.table = vocab_size * model.n_embd
        self.trained_table = 0 if self.lora else self.table
        self.positions = windows * model.block_size
        self.fp32 = FP32_BYTES * self.positions * model.n_embd
        self.dropped = self.positions * model.n_embd if on_cuda else 0  # CUDA keeps what it dropped as bools
        self.computed = self.number * self.positions * model.n_embd
        self.attention = self.number * self.positions * model.attention_width
        self.inner = self.number * self.positions * model.n_inner
        self.pairs = windows * model.n_head * model.block_size**2

    def moments(self, *, sums: int) -> Iterator[list[Piece]]:
        """Yield the pieces at the head, at the start of the backward pass, and at its end, beside so many gradients.

        Of sharded processes on CUDA also those while a layer's gradients are exchanged and the next one's computed.
        """
        table, exchanged = FP32_BYTES * self.trained_table, list[Piece]()
        if self.on_cuda and self.shards > 1:
            matrices = FP32_BYTES * layer_matrices(self.model)
            exchanged = [Piece("gradients", table, table), Piece("gradients", matrices, matrices)]
        earlier, weights = list(self.gradients()) * sums, list[Piece]()
        if self.is_half:
            # A frozen weight is cast for each product, which keeps what its backward pass needs.
            cast = 1 if self.recompute and (self.is_block_fused or self.lora) else self.model.n_layer
            cast = cast if self.shards == 1 else 0  # gathered in half precision
            half = HALF_BYTES * layer_matrices(self.model)
            weights.append(Piece("parameters", cast * half, half // 3))
            if not self.is_fused:
                weights.append(Piece("parameters", HALF_BYTES * self.table, HALF_BYTES * self.table))
        layers, idle = 1 if self.recompute else self.model.n_layer, list(self._gathered(0 if self.on_cuda else 2))
        # A layer that is computed again is there only in the backward pass; a CPU's peaks were measured with it.
        at_head = self._activations(0 if self.recompute and self.on_cuda else layers)
        yield [*earlier, *weights, *idle, *at_head, *self._head()]
        # Embedding and head share one table: each makes a gradient of it before the two are added.
        head_gradients = [Piece("gradients", table * (2 if self.is_fused else 1), table)]
        if self.is_fused:
            head_gradients.append(Piece("logits", 2 * self.fp32, self.fp32))
        between = [*earlier, *self._gathered(2), Piece("activations", 2 * self.fp32, self.fp32)]
        inner = 2 * WIDENED[self.model.feed_forward] * self.inner  # gradients between the parts of a layer
        if self.is_math:
            between.append(Piece("activations", 2 * FP32_BYTES * self.pairs, FP32_BYTES * self.pairs))
        elif self.on_cuda:  # attention's are there when those of the feed-forward part are not
            inner = max(inner, ceil(_MULTIPROCESSORS / (self.windows * self.model.n_head)) * self.fp32)
        between.append(Piece("activations", inner, self.inner))
        yield [*between, *weights, *self._activations(layers), *head_gradients]
        if exchanged:
            yield [*between, *self._activations(max(1, layers - 1)), *exchanged]
        others = list(self.gradients()) * max(sums - 1, 0)  # the newest sum is added to in place
        last = list(self.gradients(shards=1 if sums and not exchanged else self.shards))
        yield [*last, *others, *idle, Piece("gradients", table * (2 if sums else 1), table), *exchanged]

    def gradients(self, *, shards: int = 1) -> Iterator[Piece]:
        """Yield whole gradients; of several shards only that of the table is whole, which is the last to be made.

        Sharded processes keep whole ones too until the step's last micro-batch.
        """
        rest = self.parameters - self.trained_table
        yield Piece("gradients", FP32_BYTES * self.trained_table, FP32_BYTES * self.trained_table)
        yield Piece("gradients", FP32_BYTES * rest // shards, FP32_BYTES * self.model.n_inner * self.model.n_embd)

    def _gathered(self, layers: int) -> Iterator[Piece]:
        """Yield what a sharded process has gathered: the table, and layers, on a CPU with buffers and gradients."""
        if self.shards > 1:
            matrices = layer_matrices(self.model)
            yield Piece("parameters", FP32_BYTES * self.table, FP32_BYTES * self.table)
            buffers = layers if self.on_cuda else 2 * layers
            yield Piece("parameters", buffers * self.number * matrices, self.number * matrices)
            yield Piece("gradients", 0 if self.on_cuda else layers * FP32_BYTES * matrices, FP32_BYTES * matrices)

    def _activations(self, layers: int) -> Iterator[Piece]:
        """Yield what so many layers keep for the backward pass, at most one where they are recomputed, and the rest."""
        model, fp32, dropout = self.model, self.fp32, self.model.dropout
        layer = [(2 * fp32, fp32)]  # the inputs of the two norms
        # norms, q, k, v, mixed; on a CPU keys and values are repeated for each head
        keys = self.number * self.positions * model.key_width if self.on_cuda else self.attention
        layer.append((2 * self.computed + 2 * self.attention + 2 * keys, self.computed))
        # Both sides of the function; of SwiGLU gate, the other half, their product and, by autograd, the gate's SiLU.
        widened = WIDENED[model.feed_forward]
        layer.append(((widened + (1 if self.is_block_fused else widened)) * self.inner, self.inner))
        heads = self.positions * (model.attention_width + model.key_width)
        if self.is_block_fused:
            if model.qk_norm:  # queries and each head's keys before
                layer.append((2 * self.attention, 2 * self.attention))
            probabilities = block_sizes.saved_probabilities(model.block_size) * self.windows * model.n_head
            kept = HALF_BYTES * probabilities * (2 if dropout else 1)
            layer.append((kept, kept // 4))
        else:
            gain = model.norm_gain and not self.lora  # a frozen one has no gradient
            if model.norm == "rms" and gain:  # the normalised values before their gain
                layer.append((2 * fp32, fp32))
            if model.qk_norm or model.positions == "rotary":  # beside the joint product, which holds the values
                layer.append((self.number * heads, self.number * heads))
            if model.qk_norm:  # queries and keys in fp32, where they are not so anyway, and before their gain
                layer.append((FP32_BYTES * heads * (self.is_half + gain), FP32_BYTES * heads))
        if self.lora:  # between the two matrices of each adapter, before and after its scale
            ranks = self.lora.rank * (len(count_trained(model, self.lora)) // 2) // model.n_layer
            layer.append((2 * self.number * self.positions * ranks, self.number * self.positions * self.lora.rank))
        if dropout:
            layer.append((2 * (self.dropped or self.computed), self.computed))
        # What attention keeps for the backward pass besides queries, keys, values and its result.
        if self.is_math:  # with dropout also what it draws, a bool on CUDA, and its result
            dropped = FP32_BYTES + (1 if self.on_cuda else FP32_BYTES) if dropout else 0
            layer.append(((FP32_BYTES + dropped) * self.pairs, FP32_BYTES * self.pairs))
            layer.append((3 * (fp32 - self.computed), fp32))
        elif self.has_mask and not self.is_block_fused:  # as numbers
            layer.append((self.number * self.pairs // model.n_head, self.pairs))
        for size, block in layer:
            yield Piece("activations", layers * size, block)
        if self.recompute:
            yield Piece("activations", model.n_layer * fp32, fp32)
        if self.has_mask:  # of bools
            yield Piece("activations", self.pairs // model.n_head, self.pairs // model.n_head)
        # The last norm's input and output, and dropout after the embedding.
        yield Piece("activations", fp32 + self.computed + ((self.dropped or fp32) if dropout else 0), fp32)

    def _head(self) -> Iterator[Piece]:
        if not self.is_fused:
            logits = FP32_BYTES * self.positions * self.vocab_size
            yield Piece("logits", 3 * logits, logits)  # log-softmax, gradient of the losses, that of the logits
            return
        table, trained, number = self.table, self.trained_table, self.number
        yield Piece("logits", self.fp32, self.fp32)
        yield Piece("gradients", FP32_BYTES * trained, FP32_BYTES * trained)
        if not self.on_cuda:  # the product that is added to it
            yield Piece("gradients", number * trained, number * trained)
        if self.is_half or self.on_cuda:
            yield Piece("logits", number * table, number * table)
        size = block_sizes.HEAD_CHUNK_BYTES // FP32_BYTES
        each, largest = FP32_BYTES, number  # one buffer; a product in half precision makes a reordered copy
        if self.on_cuda:
            size = block_sizes.DEVICE_HEAD_CHUNK_BYTES // number
        rows = min(self.positions, max(1, size // self.vocab_size))
        if self.on_cuda:  # by Triton's one kernel: logits, their gradient, and that of the chunk before
            rows = ceil(self.positions / ceil(self.positions / rows))  # chunks are as equal as possible
            each, largest = (2 if rows == self.positions else 3) * number, number
        yield Piece("logits", each * rows * self.vocab_size, largest * rows * self.vocab_size)


def held_out_moments(model: ModelConfig, vocab_size: int, *, on_cuda: bool, is_masked: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of a held-out loss in a layer and at the head, and of a sample: in fp32, without gradients."""
    windows = max(1, block_sizes.HELD_OUT_TOKENS // model.block_size)
    fp32 = FP32_BYTES * windows * model.block_size * model.n_embd
    pairs = windows * model.n_head * model.block_size**2
    inner = WIDENED[model.feed_forward] * FP32_BYTES * windows * model.block_size * model.n_inner
    layer = [Piece("activations", 3 * fp32 + 2 * inner, inner)]  # residual stream, a norm, the feed-forward part
    if on_cuda:  # the math kernel: scores, probabilities, and where they are to be 0
        layer = [Piece("activations", 9 * fp32 + (3 * FP32_BYTES + 1) * pairs, FP32_BYTES * pairs)]
    if is_masked:
        layer.append(Piece("activations", (1 + FP32_BYTES) * pairs // model.n_head, FP32_BYTES * pairs // model.n_head))
    yield layer
    vocabulary = FP32_BYTES * model.rows(vocab_size)
    rows = min(windows * model.block_size, max(1, block_sizes.HELD_OUT_CHUNK_BYTES // vocabulary))
    chunk = rows * vocabulary
    yield [Piece("activations", 2 * fp32, fp32), Piece("logits", 2 * chunk, chunk)]
    cache = 2 * FP32_BYTES * model.n_layer * model.block_size * model.key_width
    yield [Piece("activations", cache, cache)]
