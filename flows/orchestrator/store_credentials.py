"""A Prefect block with an S3 store's credentials, which the flow's process takes into its environment alone."""

from collections.abc import MutableMapping

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from cairn.tasks.errors import InvalidConfiguration


class StoreCredentials(Block):
    """The form under Blocks; each field is the variable of its name after `AWS_`."""

    _block_type_name = "Cairn store credentials"
    _block_type_slug = "cairn-store-credentials"
    _description = "Key, secret and endpoint of an S3 store, for the deployments' parameter `store_credentials`."

    access_key_id: SecretStr
    secret_access_key: SecretStr
    session_token: SecretStr = Field(default=SecretStr(""), description="for temporary keys")
    endpoint_url: str = Field(default="", description="empty: the worker's, else Amazon's")
    region: str = Field(default="", description="empty: the worker's")


def take_credentials(name: str, environment: MutableMapping[str, str]) -> None:
    """Put this block into the environment in place of other credentials, if named; raises `InvalidConfiguration`."""
    if not name:
        return
    try:
        block = StoreCredentials.load(name)
    except ValueError as error:
        raise InvalidConfiguration(
            f"store_credentials {name}: Prefect has no block `Cairn store credentials` of this name; make it under "
            "Blocks, after `prefect block register -m cairn.flows.orchestrator.store_credentials`"
        ) from error
    for variable in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN"):
        environment.pop(variable, None)
    for field in StoreCredentials.model_fields:
        value = getattr(block, field)
        if text := value.get_secret_value() if isinstance(value, SecretStr) else value:
            environment[f"AWS_{field.upper()}"] = text
