"""Suite files (TOML) and what evaluators name, read once with the configuration: the log holds suite and hashes."""

import tomllib
from pathlib import Path

from pydantic import ValidationError

from storage.stores.verified_object import describe_file
from tasks.configuration.broken_rules import broken_rules
from tasks.configuration.evaluation_settings import SUITE_KEYS, EvaluationConfig, EvaluatorConfig
from tasks.configuration.shipped_files import SUITES, known_names, named_file
from tasks.errors import TaskError

COMMAND = "command"


def resolve_evaluation(evaluation: EvaluationConfig, folder: Path) -> EvaluationConfig:
    """Return the section with its suite read and files below `folder` hashed, unless they are; raises TaskError."""
    if evaluation.suite:
        return read_suite(named_file(evaluation.suite, SUITES, folder=folder), evaluation)
    evaluators = evaluation.evaluators
    if evaluation.command:
        short = EvaluatorConfig(
            name=COMMAND, command=evaluation.command, timeout_seconds=evaluation.timeout_seconds, required=True
        )
        evaluators = (*(item for item in evaluators if item.name != COMMAND), short)
    read = tuple(_with_files(evaluator, folder.absolute()) for evaluator in evaluators)
    return evaluation.model_copy(update={"command": (), "evaluators": read})


def read_suite(path: Path, evaluation: EvaluationConfig) -> EvaluationConfig:
    """Return the section with what the file measures; raises TaskError naming the file, the key and the rule."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(known_names(SUITES))
        raise TaskError(f"{path}: no such suite file; rule: a path, or one of {known}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{path}: not readable as TOML: {error}") from error
    unknown = sorted(document.keys() - set(SUITE_KEYS))
    if unknown:
        raise TaskError(f"{path}: {', '.join(unknown)}: unknown; rule: a suite has {', '.join(SUITE_KEYS)}")
    kept = {"every_commits": evaluation.every_commits, "timeout_seconds": evaluation.timeout_seconds}
    try:
        read = EvaluationConfig.model_validate({**kept, **document})
    except ValidationError as error:
        lines = (
            f"{path}: {rule.text.removeprefix('evaluation.')}" for rule in broken_rules(error, document, "evaluation")
        )
        raise TaskError("\n".join(lines)) from error
    return resolve_evaluation(read, path.absolute().parent)


def _with_files(evaluator: EvaluatorConfig, folder: Path) -> EvaluatorConfig:
    if evaluator.logged or evaluator.files is not None:
        return evaluator
    program, *arguments = evaluator.command
    texts = [program] if "/" in program else []  # a bare name is looked for in PATH, not here
    texts += [text for argument in arguments for text in (argument, argument.partition("=")[2])]
    files = {}
    for text in texts:
        try:
            if text and (folder / text).is_file():
                files[text] = describe_file(folder / text).sha256
        except (OSError, ValueError) as error:  # an argument need not be a path at all
            if isinstance(error, PermissionError):
                raise TaskError(f"{folder / text}: cannot be read: {error}; an evaluator names it") from error
    return evaluator.model_copy(update={"folder": str(folder), "files": files})
