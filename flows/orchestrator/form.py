"""Parameters of the deployments: type, rule and title of each, which Prefect's form and API check before a flow run.

Descriptions stand in the flows' docstrings, or here if they name configuration keys; as schema extras, because Prefect
overwrites those of a field. A rule that no type says is an `else` branch with a constant: Prefect answers with it.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from cairn.tasks.configuration.key_reference import keys_by_name

_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*"
_LOCATION = (r"^(|\S|\S.*\S)$", "a path or a URL without spaces around it")
_NAME = (
    rf"^({_RUN_ID})?$",
    "letters, digits and _ . = + - with a letter, a digit or _ at the beginning; "
    'a number needs quotes of JSON inside those of the shell, as run_id="2024"',
)
_REFERENCE = (rf"^{_RUN_ID}(@\d+)?$", "an alias such as champion, RUN, or RUN@STEP")
_DEPLOYMENT = (r"^([^/\s]+/[^/\s]+)?$", "flow/deployment, such as train-gpt/train-gpt")
_OVERRIDE = (
    f"^({'|'.join(re.escape(key) for key in keys_by_name())})=",
    "section.key=value with a key that `cairn config` lists, such as training.warmup_steps=50",
)
_NAMED_KEYS = ("training.global_batch", "training.warmup_steps", "model.n_layer", "data.sources")


def _rule(pattern: str, words: str) -> dict[str, Any]:
    return {"if": {"type": "string", "pattern": pattern}, "else": {"const": words}}


def _field(title: str, *examples: str, **rules: Any) -> Any:
    return Field(json_schema_extra={"title": title, **({"examples": list(examples)} if examples else {})}, **rules)


def _text(title: str, rule: tuple[str, str], *examples: str) -> Any:
    return Field(json_schema_extra={"title": title, "examples": list(examples), **_rule(*rule)}, max_length=2048)


def _described(title: str, description: str, example: Any, **rules: Any) -> Any:
    return Field(json_schema_extra={"title": title, "description": description, "examples": [example]}, **rules)


def _setting(title: str, key: str, example: float) -> Any:
    description = f"{keys_by_name()[key].summary} ({key}), such as {example:g}; 0: as the configuration says"
    return _described(title, description, example, ge=0)


Config = Annotated[str, _text("Configuration", _LOCATION, "quickstart", "s3://bucket/runs/bard.toml")]
RunId = Annotated[str, _text("Run id", _NAME, "bard-1")]
Steps = Annotated[int, _setting("Steps", "training.steps", 1200)]
LearningRate = Annotated[float, _setting("Learning rate", "training.lr", 1e-3)]
MicroBatch = Annotated[int, _setting("Micro-batch", "training.micro_batch", 8)]
_Override = Annotated[str, Field(json_schema_extra=_rule(*_OVERRIDE))]
_ON_TOP = "on top of the configuration, one each"
Overrides = Annotated[
    tuple[_Override, ...],
    _described(
        "Overrides",
        f"`section.key=value` {_ON_TOP}, such as "
        + ", ".join(f"{key} ({keys_by_name()[key].summary})" for key in _NAMED_KEYS)
        + ". `cairn config` lists all keys. A key that is set in a field of its own as well is refused.",
        ["training.warmup_steps=50", "training.global_batch=64"],
    ),
]
SetOverrides = Annotated[
    tuple[_Override, ...],
    _described(
        "Values to combine",
        f"`section.key=value,value` {_ON_TOP}; a run is started for each combination. Values are written as in TOML: "
        "text in quotes, a list in brackets is one value.",
        ["training.lr=1e-3,3e-4", "model.n_layer=2,4"],
    ),
]
Store = Annotated[str, _text("Store", _LOCATION, "./cairn-store", "s3://bucket/cairn")]
Credentials = Annotated[str, _field("Store credentials", "bucket-of-the-team", max_length=200)]
StartOver = Annotated[bool, _field("Start over at step 0")]
Deployment = Annotated[str, _text("Deployment that continues runs", _DEPLOYMENT, "train-gpt/train-gpt")]
Part = Annotated[int, _field("Part of the text", ge=1)]
Parts = Annotated[int, _field("Number of parts", ge=1)]
Reference = Annotated[str, _text("Checkpoint", _REFERENCE, "champion", "bard-1", "bard-1@400")]
Suite = Annotated[str, _text("Suite", _LOCATION, "deployments/suites/repetition.toml")]
Again = Annotated[bool, _field("Evaluate again what was evaluated before")]
DryRun = Annotated[bool, _field("Only list what would be deleted")]
MostSeconds = Annotated[float, _field("Begin no further run after (seconds)", gt=0, le=86_400)]
