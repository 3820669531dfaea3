"""Parameters of the deployments: type, rule and title of each, which Prefect's form and API check before a flow run.

Descriptions stand in the docstring of each flow; here stand those that name configuration keys. Titles and descriptions
are schema extras, because Prefect overwrites the title and description of a field. A rule that no type says is an
`else` branch with a constant: Prefect answers with its words, where it would answer a pattern with that expression.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from tasks.configuration.key_reference import list_keys, meaning_of

_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*"
_LOCATION = (r"^(|\S|\S.*\S)$", "a path or a URL without spaces around it")
_NAMED_KEYS = ("training.global_batch", "training.warmup_steps", "model.n_layer", "data.sources")
_KEYS = "|".join(re.escape(key.key) for key in list_keys())


def _words(pattern: str, words: str) -> dict[str, Any]:
    return {"if": {"pattern": pattern}, "else": {"const": words}}


def _field(title: str, *examples: object, text: tuple[str, str] | None = None, **rules: Any) -> Any:
    extra = {"title": title, **({"examples": list(examples)} if examples else {}), **(_words(*text) if text else {})}
    return Field(json_schema_extra=extra, **rules)


def _setting(title: str, key: str, example: float) -> Any:
    description = f"{meaning_of(key)} ({key}), such as {example:g}; 0: as the configuration says"
    return Field(ge=0, json_schema_extra={"title": title, "description": description, "examples": [example]})


ConfigParameter = Annotated[
    str,
    _field(
        "Configuration",
        *("quickstart", "deployments/quickstart.toml", "s3://bucket/runs/bard.toml"),
        text=_LOCATION,
        max_length=2048,
    ),
]
RunIdParameter = Annotated[
    str,
    _field(
        "Run id",
        "bard-1",
        text=(rf"^({_RUN_ID})?$", "letters, digits and _ . = + - with a letter, a digit or _ at the beginning"),
        max_length=200,
    ),
]
StepsParameter = Annotated[int, _setting("Steps", "training.steps", 1200)]
LearningRateParameter = Annotated[float, _setting("Learning rate", "training.lr", 1e-3)]
MicroBatchParameter = Annotated[int, _setting("Micro-batch", "training.micro_batch", 8)]
OverridesParameter = Annotated[
    tuple[
        Annotated[
            str,
            Field(
                json_schema_extra=_words(
                    f"^({_KEYS})=",
                    "section.key=value with a key that `cairn config` lists, such as training.warmup_steps=50",
                )
            ),
        ],
        ...,
    ],
    Field(
        json_schema_extra={
            "title": "Overrides",
            "description": "`section.key=value` on top of the configuration, one each, such as "
            + ", ".join(f"{key} ({meaning_of(key)})" for key in _NAMED_KEYS)
            + ". `cairn config` lists all keys. A key that is set in a field of its own as well is refused.",
            "examples": [["training.warmup_steps=50", "training.global_batch=64"]],
        }
    ),
]
StoreParameter = Annotated[str, _field("Store", "./cairn-store", "s3://bucket/cairn", text=_LOCATION, max_length=2048)]
CredentialsParameter = Annotated[str, _field("Store credentials", "bucket-of-the-team", max_length=200)]
StartOverParameter = Annotated[bool, _field("Start over at step 0")]
DeploymentParameter = Annotated[
    str,
    _field(
        "Deployment that continues runs",
        "train-gpt/train-gpt",
        text=(r"^([^/\s]+/[^/\s]+)?$", "flow/deployment, such as train-gpt/train-gpt"),
    ),
]
ReferenceParameter = Annotated[
    str,
    _field(
        "Checkpoint",
        *("champion", "bard-1", "bard-1@400"),
        text=(rf"^{_RUN_ID}(@\d+)?$", "an alias such as champion, RUN, or RUN@STEP"),
    ),
]
SuiteParameter = Annotated[str, _field("Suite", "deployments/suites/repetition.toml", text=_LOCATION)]
AgainParameter = Annotated[bool, _field("Evaluate again what was evaluated before")]
DryRunParameter = Annotated[bool, _field("Only list what would be deleted")]
MostSecondsParameter = Annotated[float, _field("Begin no further run after (seconds)", gt=0, le=86_400)]
