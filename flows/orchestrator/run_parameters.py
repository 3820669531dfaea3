"""Parameters of the deployments: type, rule and title of each, which Prefect's form and API check before a flow run.

Descriptions stand in the docstring of each flow; here stand those that name configuration keys. Titles and descriptions
are schema extras, because Prefect overwrites the title and description of a field.
"""

from typing import Annotated

from pydantic import Field

from tasks.configuration.key_reference import meaning_of

_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]*"
_LOCATION = r"^(|\S|\S.*\S)$"
"""A path or a URL, or nothing, without spaces around it."""
_NAMED_KEYS = ("training.steps", "training.lr", "training.global_batch", "model.n_layer", "data.sources")

ConfigParameter = Annotated[
    str,
    Field(
        pattern=_LOCATION,
        max_length=2048,
        json_schema_extra={
            "title": "Configuration",
            "examples": ["quickstart", "deployments/quickstart.toml", "s3://bucket/runs/bard.toml"],
        },
    ),
]
RunIdParameter = Annotated[
    str,
    Field(pattern=rf"^({_RUN_ID})?$", max_length=200, json_schema_extra={"title": "Run id", "examples": ["bard-1"]}),
]
OverridesParameter = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*=")], ...],
    Field(
        json_schema_extra={
            "title": "Overrides",
            "description": "`section.key=value` on top of the configuration, one each, such as "
            + ", ".join(f"{key} ({meaning_of(key)})" for key in _NAMED_KEYS)
            + ". `cairn config` lists all keys.",
            "examples": [["training.steps=1200", "training.lr=1e-3"]],
        }
    ),
]
StoreParameter = Annotated[
    str,
    Field(
        pattern=_LOCATION,
        max_length=2048,
        json_schema_extra={"title": "Store", "examples": ["./cairn-store", "s3://bucket/cairn"]},
    ),
]
StartOverParameter = Annotated[bool, Field(json_schema_extra={"title": "Start over at step 0"})]
DeploymentParameter = Annotated[
    str,
    Field(
        pattern=r"^([^/\s]+/[^/\s]+)?$",
        json_schema_extra={"title": "Deployment that continues runs", "examples": ["train-gpt/train-gpt"]},
    ),
]
ReferenceParameter = Annotated[
    str,
    Field(
        pattern=rf"^{_RUN_ID}$",
        json_schema_extra={"title": "Checkpoint", "examples": ["champion", "bard-1", "bard-1@400"]},
    ),
]
SuiteParameter = Annotated[
    str,
    Field(pattern=_LOCATION, json_schema_extra={"title": "Suite", "examples": ["deployments/suites/repetition.toml"]}),
]
AgainParameter = Annotated[bool, Field(json_schema_extra={"title": "Evaluate again what was evaluated before"})]
DryRunParameter = Annotated[bool, Field(json_schema_extra={"title": "Only list what would be deleted"})]
MostSecondsParameter = Annotated[
    float, Field(gt=0, le=86_400, json_schema_extra={"title": "Begin no further run after (seconds)"})
]
