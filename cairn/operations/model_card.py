"""The model card (README) of exported weights, written from the records alone: equal records give equal cards."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from reports.pages.markdown import markdown_text
from reports.queries.alias_history import AliasPromotion
from storage.logs.log_entry import CheckpointReference
from storage.logs.run_entries import EvaluationRecorded, RunOpened
from storage.logs.run_state import RunState
from storage.snapshots.snapshot_manifest import SnapshotManifest
from storage.stores.document import encode
from tasks.configuration.run_configuration import RunConfig
from tasks.configuration.stored_configuration import parse_stored_configuration
from tasks.text.format import one_line

_SOURCES_SHOWN = 20
_USAGE = (
    "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    'model, tokenizer = (kind.from_pretrained("path/to/this/folder") for kind in '
    "(AutoModelForCausalLM, AutoTokenizer))\n"
    'print(tokenizer.decode(model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=20)[0]))\n```'
)
_MASKED = (
    "- Training kept attention within each document. `transformers` has no such setting and attends across documents:\n"
    "  give it one document at a time, or expect other logits after an end-of-text token than in training."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The records of one committed model; `parameters` leaves out the position table."""

    state: RunState
    opened: RunOpened
    reference: CheckpointReference
    manifest: SnapshotManifest
    snapshot_id: str
    parameters: int
    end_of_text: str
    promotions: tuple[AliasPromotion, ...]

    @property
    def config(self) -> RunConfig:
        """The run's frozen configuration; what is not frozen has its default."""
        return parse_stored_configuration(self.opened.config)


def write_card(facts: ModelFacts) -> str:
    """Return the card: front matter, use, provenance, measurements, promotions, limits, configuration."""
    model, run = facts.config.model, f"{facts.opened.run_id}@{facts.reference.step}"
    sections = (
        _front_matter(facts),
        f"# {run}\n\nA GPT-2 of {facts.parameters:,} parameters ({model.n_layer} layers, {model.n_head} heads, width "
        f"{model.n_embd}, {model.block_size} tokens of context), trained by Cairn.",
        _USAGE,
        "## Where it comes from\n\n" + _table(("", ""), _provenance(facts)),
        _sources(facts.manifest),
        _measurements(e for e in facts.state.evaluations if e.manifest_sha256 == facts.reference.manifest_sha256),
        _promotions(facts.promotions),
        _limits(facts),
        f"## Configuration, frozen when the run was opened\n\n```json\n{encode(facts.opened.config).decode()}```",
    )
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: ModelFacts) -> str:
    tags = "\n".join(f"- {tag}" for tag in ("gpt2", "cairn", json.dumps(facts.opened.model_family)))
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n{tags}\n---"


def _provenance(facts: ModelFacts) -> Iterator[tuple[object, ...]]:
    config, reference, manifest = facts.config, facts.reference, facts.manifest
    yield "run", _code(facts.opened.run_id)
    yield "step", f"{reference.step:,} of {facts.opened.total_steps:,}"
    yield "checkpoint manifest, sha256", _code(reference.manifest_sha256)
    yield "data snapshot", _code(facts.snapshot_id)
    ids = f"{manifest.vocab_size:,} ids, end of text {manifest.end_of_text_id}"
    yield "tokenizer, sha256", f"{_code(manifest.tokenizer_sha256)}, {ids}"
    split = manifest.splits.train
    yield "tokens in the train split", f"{split.tokens:,} in {split.documents:,} documents"
    yield "tokens seen", f"{reference.step * config.training.global_batch * config.model.block_size:,}"
    if facts.opened.initial_weights_sha256:
        yield "began from weights, sha256", _code(facts.opened.initial_weights_sha256)
    for attempt in facts.state.attempts:
        if attempt.started.attempt == reference.attempt:
            yield "attempt", reference.attempt
            yield "samples left out as bad", f"{attempt.started.quarantined_samples:,}"
            yield "code version", _code(attempt.started.code_version)


def _sources(manifest: SnapshotManifest) -> str:
    rows = [
        (_code(source.name), f"{source.documents:,}", f"{source.bytes:,}", _code(source.sha256))
        for source in manifest.sources[:_SOURCES_SHOWN]
    ]
    more = len(manifest.sources) - len(rows)
    rest = f"\n\nand {more:,} more" if more else ""
    return "## Sources\n\n" + _table(("source", "documents", "bytes", "sha256"), rows) + rest


def _measurements(evaluations: Iterable[EvaluationRecorded]) -> str:
    rows = [
        (f"{markdown_text(item.suite)} {_code(item.suite_sha256)}", _code(name), f"{value:.6g}", _time(item.started_at))
        for item in evaluations
        for name, value in sorted(item.metrics.items())
    ]
    table = _table(("suite", "metric", "value", "measured (UTC)"), rows) if rows else "Nothing was measured."
    return f"## Evaluations of exactly these weights\n\n{table}"


def _promotions(promotions: Sequence[AliasPromotion]) -> str:
    rows = [
        (
            _code(view.alias) + (" (now)" if view.current else ""),
            _time(view.promoted_at),
            _code(view.by),
            markdown_text(view.why),
        )
        for view in promotions
    ]
    table = _table(("alias", "promoted (UTC)", "by", "why"), rows) if rows else "No alias was pointed at them."
    return f"## Promotions\n\n{table}"


def _limits(facts: ModelFacts) -> str:
    lines = [
        "## Limits\n",
        f"- At most {facts.config.model.block_size} tokens at once: positions are learned, there are none beyond.",
        "- It continues text as its sources would. Nothing was done to make it follow instructions, tell the truth or",
        "  leave out what is harmful in its sources.",
        f"- {_code(facts.end_of_text)} spelled out in a text is read as text, as in training; the id",
        f"  {facts.manifest.end_of_text_id} itself begins and ends documents.",
        "- No licence is stated here: what may be done with it follows from its sources.",
    ]
    return "\n".join([*lines, _MASKED] if facts.config.training.mask_documents else lines)


def _table(columns: Sequence[str], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _code(text: str) -> str:
    """Return text as code that stays within its cell."""
    quoted = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{quoted}`"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}"
