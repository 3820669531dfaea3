"""Parameters of the deployments: type, rule and title of each, which Prefect's form and API check before a flow run.

Descriptions stand in the docstring of each flow; here stand those that name configuration keys. Titles and descriptions
are schema extras, because Prefect overwrites the title and description of a field.
"""

from typing import Annotated, Any

from pydantic import Field

from tasks.configuration.key_reference import meaning_of

_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*"
_LOCATION = r"^(|\S|\S.*\S)$"
"""A path or a URL, or nothing, without spaces around it."""
_NAMED_KEYS = ("training.steps", "training.lr", "training.global_batch", "model.n_layer", "data.sources")


def _field(title: str, *examples: object, **rules: Any) -> Any:
    extra: dict[str, Any] = {"title": title, "examples": list(examples)} if examples else {"title": title}
    return Field(json_schema_extra=extra, **rules)


ConfigParameter = Annotated[
    str,
    _field(
        "Configuration",
        *("quickstart", "deployments/quickstart.toml", "s3://bucket/runs/bard.toml"),
        pattern=_LOCATION,
        max_length=2048,
    ),
]
RunIdParameter = Annotated[str, _field("Run id", "bard-1", pattern=rf"^({_RUN_ID})?$", max_length=200)]
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
    str, _field("Store", "./cairn-store", "s3://bucket/cairn", pattern=_LOCATION, max_length=2048)
]
StartOverParameter = Annotated[bool, _field("Start over at step 0")]
DeploymentParameter = Annotated[
    str, _field("Deployment that continues runs", "train-gpt/train-gpt", pattern=r"^([^/\s]+/[^/\s]+)?$")
]
ReferenceParameter = Annotated[
    str, _field("Checkpoint", "champion", "bard-1", "bard-1@400", pattern=rf"^{_RUN_ID}(@\d+)?$")
]
SuiteParameter = Annotated[str, _field("Suite", "deployments/suites/repetition.toml", pattern=_LOCATION)]
AgainParameter = Annotated[bool, _field("Evaluate again what was evaluated before")]
DryRunParameter = Annotated[bool, _field("Only list what would be deleted")]
MostSecondsParameter = Annotated[float, _field("Begin no further run after (seconds)", gt=0, le=86_400)]
