"""The parameters of the deployments as people and scripts give them: one type each, with its rule and its title.

Owns what the form in the orchestrator's UI says and what its server refuses before a flow run exists. What no schema
can know (whether a file is there, whether the run is another one) the flow refuses in its first second. Descriptions
stand in each flow's docstring. Titles are schema extras, because the orchestrator writes a parameter's name over any.
"""

from typing import Annotated

from pydantic import Field

_RUN_ID = r"[A-Za-z0-9_][A-Za-z0-9_.@=+-]*"
_LOCATION = r"^(|\S|\S.*\S)$"
"""A path or a URL, or nothing; never the spaces around it that a form happily sends."""

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
    Field(json_schema_extra={"title": "Overrides", "examples": [["training.steps=1200", "training.lr=1e-3"]]}),
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
    Field(
        pattern=_LOCATION,
        json_schema_extra={"title": "Suite", "examples": ["deployments/suites/repetition.toml"]},
    ),
]
AgainParameter = Annotated[bool, Field(json_schema_extra={"title": "Measure again what is on record"})]
DryRunParameter = Annotated[bool, Field(json_schema_extra={"title": "Only say what would go"})]
MostSecondsParameter = Annotated[
    float, Field(gt=0, le=86_400, json_schema_extra={"title": "Begin no further run after (seconds)"})
]
