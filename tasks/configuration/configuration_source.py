"""Reads a run configuration from a path, a name in deployments/ or a URL, under the environment and `--set`.

Relative paths in a file start at its folder; those in a file from a URL start at the working directory. Suite files,
and what evaluators name, are read with it: the log holds the suite and hashes.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from cairn.storage.stores import object_store, redaction, regular_file
from cairn.storage.stores.open_store import path_of
from cairn.tasks.configuration import addresses
from cairn.tasks.configuration.addresses import CONFIGURATIONS, SUITES, find_file, is_name, known_names, why_unreadable
from cairn.tasks.configuration.key_reference import BrokenRule, broken_rules, keys_by_name, section_meanings
from cairn.tasks.configuration.run_configuration import CodeConfig, RunConfig
from cairn.tasks.configuration.settings import SUITE_KEYS, EvaluationConfig, EvaluatorConfig, NotifyConfig
from cairn.tasks.errors import InvalidConfiguration, TaskError

MOST_BYTES = 1024 * 1024
COMMAND = "command"
MOST_RUNS = 200
Alone = TypeVar("Alone", NotifyConfig, CodeConfig)
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.+-]+")


def read_configuration(source: str, *, overrides: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """Read, overlay and validate a configuration, or the overlays alone; raises `InvalidConfiguration`."""
    if problem := redaction.find_credentials(source, instead="the environment"):
        raise InvalidConfiguration(f"config: the URL {problem}")
    if not _is_remote(source):
        return load_configuration(_path(source) if source else None, overrides=overrides, environment=environment)
    shown = redaction.without_query(source)
    if problem := addresses.wrong_scheme(shown):
        raise InvalidConfiguration(f"config {shown!r}: {problem}; rule: {addresses.READABLE}")
    import fsspec  # takes time to import, and only URLs need it

    try:
        with fsspec.open(source, "rb") as file:
            data: bytes = file.read(MOST_BYTES + 1)
    except Exception as error:  # every file system has errors of its own
        raise InvalidConfiguration(f"{shown}: {why_unreadable(error, source)}; rule: a configuration file") from error
    if len(data) > MOST_BYTES:
        raise InvalidConfiguration(f"{shown}: more than {MOST_BYTES:,} bytes; rule: a TOML file written by people")
    return parse_configuration(_parse_toml(data, shown), overrides=overrides, environment=environment, name=shown)


def load_configuration(path: Path | None, *, overrides: Sequence[str], environment: Mapping[str, str]) -> RunConfig:
    """Read, overlay and validate a file; raises `InvalidConfiguration` with one line for each broken rule."""
    name = str(path or "(no file)")
    try:
        document = _parse_toml(regular_file.read_file(path, MOST_BYTES), name) if path else {}
    except FileNotFoundError as error:
        close = _meant(name, [str(file) for file in path.parent.glob("*.toml")]) if path else ""
        raise InvalidConfiguration(f"{name}: no such configuration file{close}") from error
    except OSError as error:
        raise InvalidConfiguration(f"{name}: cannot be read: {error.strerror}; name a configuration file") from error
    folder = path.absolute().parent if path else None
    return parse_configuration(document, overrides=overrides, environment=environment, name=name, folder=folder)


def parse_configuration(
    document: Mapping[str, Any],
    *,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    name: str,
    folder: Path | None = None,
) -> RunConfig:
    """Overlay environment and `--set`, validate, read suite and module; relative paths start at `folder`, or here.

    The module's files, unless a log names them, are given by this command: it may run them.
    """
    layers = _Layers(document, overrides, environment, name)
    try:
        config = RunConfig.model_validate(layers.document)
        evaluation = resolve_evaluation(config.evaluation, folder or Path.cwd())
    except ValidationError as error:
        raise layers.refusal(error) from error
    except TaskError as error:
        where = layers.origins.get("evaluation.suite", f"{name}: evaluation")
        raise InvalidConfiguration(f"{where}: {error}") from error
    read: dict[str, Any] = {"evaluation": evaluation, "exporters": config.exporters.based_at(folder or Path.cwd())}
    if config.model.module and config.model.files is None:
        from cairn.tasks.configuration.network_module import read_module  # takes time, and few runs have one

        model, files = read_module(config.model, folder or Path.cwd())
        read |= {"model": model, "code": config.code.with_files(files)}
    return config.model_copy(update=read)


def read_notify(environment: Mapping[str, str]) -> NotifyConfig:
    """Return `[notify]` as the environment alone sets it, for a process that trains no run of its own."""
    return _read_alone("notify", NotifyConfig, environment)


def allowed_code(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the digests of `[code]` as the environment alone allows them, for a command without a configuration."""
    return _read_alone("code", CodeConfig, environment).allow


def _read_alone(name: str, section: type[Alone], environment: Mapping[str, str]) -> Alone:
    given = _Layers({}, (), environment, "environment").document.get(name, {})
    try:
        return section.model_validate(given)
    except ValidationError as error:
        texts = (f"environment: {rule.text}" for rule in broken_rules(error, given, name))
        raise InvalidConfiguration("\n".join(texts)) from error


def resolve_evaluation(evaluation: EvaluationConfig, folder: Path) -> EvaluationConfig:
    """Return the section with its suite read and files below `folder` hashed, unless they are; raises TaskError."""
    if evaluation.suite:
        return read_suite(find_file(evaluation.suite, SUITES, folder=folder), evaluation)
    evaluators, command, limit = evaluation.evaluators, evaluation.command, evaluation.timeout_seconds
    if command:
        short = EvaluatorConfig(name=COMMAND, command=command, timeout_seconds=limit, required=True)
        evaluators = (*(item for item in evaluators if item.name != COMMAND), short)
    read = tuple(_with_files(evaluator, folder.absolute()) for evaluator in evaluators)
    return evaluation.model_copy(update={"command": (), "evaluators": read})


def read_suite(path: Path, evaluation: EvaluationConfig) -> EvaluationConfig:
    """Return the section with the keys of the file; raises TaskError naming the file, the key and the rule."""
    try:
        document = tomllib.loads(regular_file.read_file(path, MOST_BYTES).decode("utf-8-sig"))
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
        texts = (rule.text.removeprefix("evaluation.") for rule in broken_rules(error, document, "evaluation"))
        raise TaskError("\n".join(f"{path}: {text}" for text in texts)) from error
    return resolve_evaluation(read, path.absolute().parent)


def configuration_folder(source: str) -> Path:
    """Return where relative paths in the configuration start."""
    return Path.cwd() if not source or _is_remote(source) else _path(source).absolute().parent


def configuration_name(source: str) -> str:
    """Return the name of the file without its suffix and folders."""
    return PurePosixPath(urlsplit(source).path if "://" in source else source).stem


def _with_files(evaluator: EvaluatorConfig, folder: Path) -> EvaluatorConfig:
    if evaluator.logged or evaluator.files is not None:
        return evaluator
    program, *arguments = evaluator.command
    texts = [program] if "/" in program else []  # a bare name is found in PATH, not here
    texts += [text for argument in arguments for text in (argument, argument.partition("=")[2])]
    files = {}
    for text in texts:
        try:
            if text and (folder / text).is_file():
                files[text] = object_store.describe_file(folder / text).sha256
        except (OSError, ValueError) as error:  # an argument need not be a path at all
            if isinstance(error, PermissionError):
                raise TaskError(f"{folder / text}: cannot be read: {error}; an evaluator names it") from error
    return evaluator.model_copy(update={"folder": str(folder), "files": files})


def _path(source: str) -> Path:
    """Return the file that a path, a `file://` URL or a bare name means; a file of exactly that name comes first."""
    if source.startswith("file://"):
        return path_of(source)
    path = find_file(source, CONFIGURATIONS, folder=Path())
    if is_name(source) and not path.exists():
        known = known_names(CONFIGURATIONS)
        problem = f"no such file, and no {source}.toml in deployments{_meant(source, known)}"
        rule = f"a path, a URL or one of {', '.join(known)}. A run that exists is continued with --run-id {source}"
        raise InvalidConfiguration(f"config {source!r}: {problem}; rule: {rule}")
    return path


def _meant(given: str, known: Sequence[str]) -> str:
    close = get_close_matches(given, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _is_remote(source: str) -> bool:
    return "://" in source and not source.startswith("file://")


def _parse_toml(data: bytes, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        rule = "" if shown.endswith(".toml") else "; a configuration names its text in data.sources"
        raise InvalidConfiguration(f"{shown}: not readable as TOML: {error}{rule}") from error


class _Layers:
    """A document under the environment and `--set`; `origins` has the variable or option for each key that one set."""

    def __init__(
        self, document: Mapping[str, Any], overrides: Sequence[str], environment: Mapping[str, str], name: str
    ) -> None:
        self.document, self.origins, self._name = deepcopy(dict(document)), dict[str, str](), name
        sections = tuple(f"CAIRN_{section.upper()}_" for section in RunConfig.model_fields)
        single = {variable for variable in environment if variable.startswith(sections) and "__" not in variable}
        for known in keys_by_name().values() if single else ():  # making that list takes a while
            right = f"CAIRN_{known.key.upper().replace('-', '_').replace('.', '__')}"
            if known.section and (wrong := right.replace("__", "_")) in single:
                advice = f"did you mean {right}? Two underscores end a section"
                raise InvalidConfiguration(f"{wrong}: sets nothing; {advice}")
        for variable, value in sorted(environment.items()):
            if variable.startswith("CAIRN_") and "__" in variable:
                self._put(variable.removeprefix("CAIRN_").lower().split("__"), value, origin=variable)
        for override in overrides:
            key, separator, value = override.partition("=")
            if not separator or not key:
                raise InvalidConfiguration(f"--set {override!r}: must be section.key=value")
            self._put(key.split("."), value, origin=f"--set {override}")
        if "model.module" in self.origins:  # another module than that of the files in a log
            self.document["model"].pop("files", None)
        if "evaluation.suite" in self.origins:  # it replaces the document's suite
            for key in (*SUITE_KEYS, "command"):
                if f"evaluation.{key}" not in self.origins:
                    self.document["evaluation"].pop(key, None)

    def refusal(self, error: ValidationError) -> InvalidConfiguration:
        """Return the error with a line for each broken rule, which names the layer that broke it."""
        lines = (f"{self._origin(rule)}: {rule.text}" for rule in broken_rules(error, self.document))
        return InvalidConfiguration("\n".join(lines))

    def _origin(self, rule: BrokenRule) -> str:
        """Return the overlay that set the key, or one that the broken rule of its section names; else the document."""
        within = ((key, origin) for key, origin in self.origins.items() if key.startswith(f"{rule.key}."))
        named = (origin for key, origin in within if rule.unknown or f"{key.rpartition('.')[2]}=" in rule.text)
        return self.origins.get(rule.key) or next(named, self._name)

    def _put(self, keys: Sequence[str], text: str, *, origin: str) -> None:
        section, path = self.document, ".".join(keys[:-1])
        # The name of a variable cannot hold the hyphen of [budgets.bad-data].
        if "_" in path and (hyphened := path.replace("_", "-")) in section_meanings():
            keys = [*hyphened.split("."), keys[-1]]
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise InvalidConfiguration(f"{origin}: {key} is a value, not a section")
        try:
            section[keys[-1]] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            section[keys[-1]] = text
        self.origins[".".join(keys)] = origin


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMember:
    """One run of a set and its overrides."""

    run_id: str
    overrides: tuple[str, ...]


def expand_set(name: str, overrides: Sequence[str]) -> tuple[SetMember, ...]:
    """Return the runs `NAME.key=value` that the overrides ask for; one run of this name where each key has one value.

    Several values are separated by commas, each written as in TOML (text in quotes). A list in brackets is one value,
    and so is everything that cannot be read in this way. Raises `InvalidConfiguration` for two runs of one name, or
    more than `MOST_RUNS`.
    """
    choices = [_choices(override) for override in overrides]
    keys = [override.partition("=")[0].strip() for override in overrides]
    ends = [key.rpartition(".")[2] for key in keys]
    short = [key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)]
    varied = [place for place, values in enumerate(choices) if len(values) > 1]
    if not varied:
        return (SetMember(run_id=name, overrides=tuple(overrides)),)
    members = []
    for chosen in product(*choices):
        parts = [f"{short[place]}={_UNNAMEABLE.sub('_', chosen[place]).strip('_')}" for place in varied]
        settings = tuple(f"{key}={value}" for key, value in zip(keys, chosen, strict=True))
        members.append(SetMember(run_id=".".join([name, *parts]), overrides=settings))
        if len(members) > MOST_RUNS:
            raise InvalidConfiguration(f"--set: asks for more than {MOST_RUNS} runs; name fewer values")
    names = [member.run_id for member in members]
    if repeated := next((one for one in names if names.count(one) > 1), None):
        raise InvalidConfiguration(f"--set: two runs would be named {repeated}; name each value once, and each key")
    return tuple(members)


def _choices(override: str) -> list[str]:
    """Return the values of one `section.key=value` as texts."""
    text = override.partition("=")[2]
    try:
        values = tomllib.loads(f"values = [{text}]")["values"]
        return [json.dumps(value) for value in values] if len(values) > 1 else [text]
    except (tomllib.TOMLDecodeError, TypeError):  # no list of values, or one of dates
        return [text]
