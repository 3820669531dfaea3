"""Where a package stands: the folders at the top level are imported below `cairn`."""

from pathlib import Path

TOP_LEVEL = ("cairn", "deployments", "flows", "model", "reports", "storage", "tasks")


def folder_of(package: str) -> Path:
    """The folder of a package, from the root: `cairn.flows.run` stands in flows/run."""
    parts = package.split(".")
    return Path(*parts[1:]) if len(parts) > 1 and parts[1] in TOP_LEVEL else Path(*parts)


def module_of(path: str) -> str:
    """The dotted name of a file: flows/train_gpt.py is `cairn.flows.train_gpt`."""
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return name if name.split(".")[0] == "cairn" else f"cairn.{name}"
