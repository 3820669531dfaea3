"""A network of one's own, `model.module = "my_net.py:build"`: its files are read and parsed here; nothing of them runs.

They are the named one and those beside it that it imports; they may import torch, numpy, the standard library and the
packages of `model.imports` as well. Only a machine itself says which of them it runs.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from cairn.model.configuration.network import FILLED_IN, KNOWN_PACKAGES, OF_MODULE, PYTHON_FILE, ModelConfig
from cairn.storage.errors import IntegrityError
from cairn.storage.stores import codec, object_store, regular_file
from cairn.tasks.configuration.addresses import expand_home
from cairn.tasks.errors import InvalidConfiguration

_MOST_BYTES, _MOST_FILES = 1 << 20, 50
_PLAIN: dict[str, Any] = {"int": Annotated[int, Field(ge=-(2**63), lt=2**63)], "float": float, "bool": bool, "str": str}
"""Types of arguments that are no lists, as an annotation names them."""
_RULE = "int, float, bool, str, Literal[…], list[…] or tuple[…] of the first four, or one of all that | None"


def read_module(model: ModelConfig, folder: Path) -> tuple[ModelConfig, dict[str, bytes]]:
    """Return [model] with the hashes of its module's files and all literal arguments, and the files' bytes by name.

    Raises InvalidConfiguration with a line for each broken rule.
    """
    named, _, entry = (model.module or "").rpartition(":")
    if not named.endswith(".py") or not entry.isidentifier():
        raise _refusal(model, "rule: a Python file and the name of a function or class in it, such as my_net.py:build")
    path = folder / expand_home("model.module", named)
    trees, files = dict[str, ast.Module](), dict[str, bytes]()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file.name in files:
            continue
        if len(files) == _MOST_FILES or not re.match(PYTHON_FILE, file.name):
            rule = f"at most {_MOST_FILES} files with names of letters, digits and '_'"
            raise _refusal(model, f"{file.name} is one file more than it may be made of; rule: {rule}")
        files[file.name], trees[file.name] = _read(model, file)
        waiting += _files_beside(model, file, trees[file.name])
    arguments = _check_arguments(model, _parameters(model, trees[path.name], entry))
    hashes = {name: codec.sha256(files[name]) for name in sorted(files)}
    module = f"{path.name}:{entry}"  # without folders, which another machine has otherwise
    return model.model_copy(update={"module": module, "files": hashes, "arguments": arguments}), files


def require_allowed(model: ModelConfig, allowed: Sequence[str]) -> None:
    """Raise InvalidConfiguration unless this machine allows each file of the module; other networks have none."""
    if not model.module:
        return
    files = model.files or {}
    missing = [f"{name} (code/{digest}.py)" for name, digest in files.items() if digest not in allowed]
    if missing or not files:
        named = ", ".join(missing) or "one without files"
        every = ",".join(files.values())
        problem = f"this machine runs code of a store only where its own configuration allows it, and not {named}"
        rule = "a file given on this command line, or one whose sha256 is allowed"
        remedy = f"Give the configuration beside the file, or read it in the store and set CAIRN_CODE__ALLOW={every}"
        raise _refusal(model, f"{problem}; rule: {rule}. {remedy}")


def keep_files(store: object_store.ObjectStore, model: ModelConfig, files: Mapping[str, bytes]) -> None:
    """Store each file of the module that this command was given as `code/<sha256>.py`, over a damaged one too."""
    for name, digest in (model.files or {}).items():
        if codec.sha256(files.get(name, b"")) == digest:
            store.write(f"code/{digest}.py", files[name])


def read_files(store: object_store.ObjectStore, model: ModelConfig, allowed: Sequence[str]) -> dict[str, bytes]:
    """Return the stored bytes of the module's files by name, none for another network.

    Raises InvalidConfiguration unless each of them is allowed, and IntegrityError if one is missing or has changed.
    """
    require_allowed(model, allowed)
    promised = {name: promised_file(store, name, digest) for name, digest in (model.files or {}).items()}
    return {name: bytes(object_store.read_verified(store, expected)) for name, expected in promised.items()}


def promised_file(store: object_store.ObjectStore, name: str, digest: str) -> object_store.ExpectedObject:
    """Return the stored file; raises IntegrityError if it is missing."""
    if (size := store.size(key := f"code/{digest}.py")) is None or size > _MOST_BYTES:
        problem = "missing" if size is None else f"{size:,} bytes"
        raise IntegrityError(f"{key}: {problem}, and the run's network is made by it ({name}); restore it")
    return object_store.ExpectedObject(key=key, bytes=size, sha256=digest)


def module_versions(model: ModelConfig) -> dict[str, str]:
    """Return the sha256 of each file of a module and the installed version of each package that it names.

    Raises InvalidConfiguration for a package that is not installed; of another network there are none.
    """
    from importlib.metadata import version

    versions = dict(model.files or {})
    for name in model.imports:
        if name in sys.stdlib_module_names:
            continue
        if not (distributions := _distributions().get(name)):
            raise InvalidConfiguration(f"model.imports = {name!r}: it is not installed on this machine")
        versions[name] = version(distributions[0])
    return versions


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return package → what installed it; reading this takes half a second, and a trainer asks at every checkpoint."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _read(model: ModelConfig, file: Path) -> tuple[bytes, ast.Module]:
    try:
        content = regular_file.read_file(file, _MOST_BYTES)
        return content, ast.parse(content)
    except SyntaxError as error:
        raise _refusal(model, f"{file.name}, line {error.lineno}: {error.msg}; rule: a file of this Python") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "strerror", None) or error
        raise _refusal(model, f"{file} cannot be read: {why}; relative paths start at the configuration") from error


def _files_beside(model: ModelConfig, file: Path, tree: ast.Module) -> Iterator[Path]:
    """Yield the files beside this one that it imports; refuses what a run may not depend on."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        where = f"{file.name}, line {node.lineno}"
        names, level = [alias.name for alias in node.names], 0
        if isinstance(node, ast.ImportFrom):
            names, level = [node.module] if node.module else names, node.level
        if level > 1:
            raise _refusal(model, f"{where}: imports from a folder above; rule: plain files in one folder")
        for root, _, within in (name.partition(".") for name in names):
            beside = file.parent / f"{root}.py"
            known = root in KNOWN_PACKAGES or root in model.imports
            if beside.exists() and known:
                raise _refusal(model, f"{where}: {beside.name} lies beside it and has a package's name; rename it")
            if beside.is_symlink():
                raise _refusal(model, f"{where}: {beside.name} is a link; rule: an ordinary file beside it")
            if beside.exists() and within:
                raise _refusal(model, f"{where}: nothing named {within} is within {beside.name}; rule: plain files")
            if beside.exists():
                yield beside
            elif level:
                raise _refusal(model, f"{where}: no {beside.name} lies beside it; rule: plain files in one folder")
            elif not known and node in tree.body:  # one further inside may never run: it is refused where it does
                packages = "torch, numpy, the standard library, and files beside it"
                raise _refusal(model, f"{where}: imports {root}; rule: {packages}, or name it in model.imports")


def _parameters(model: ModelConfig, tree: ast.Module, name: str) -> ast.arguments:
    """Return what the function, or the class's own __init__, is called with; self not."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
    if not found:
        raise _refusal(model, f"the file defines no {name}; rule: a function or class at its top level")
    entry: ast.stmt = found[-1]
    if isinstance(entry, ast.ClassDef):
        made = [node for node in entry.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not made:
            raise _refusal(model, f"class {name} has no __init__ of its own; write one, or a function that makes it")
        entry = made[-1]
    assert isinstance(entry, ast.FunctionDef)
    declared = entry.args
    if declared.vararg or declared.kwarg or declared.posonlyargs:
        raise _refusal(model, f"{name} takes *, ** or / arguments; rule: each argument has a name and a type")
    if isinstance(found[-1], ast.ClassDef):
        declared.args = declared.args[1:]
    return declared


def _check_arguments(model: ModelConfig, declared: ast.arguments) -> dict[str, Any]:
    """Return the arguments given, and those with a literal default; raises with a line for each that is wrong."""
    given, every = model.arguments or {}, [*declared.args, *declared.kwonlyargs]
    defaults = [None] * (len(declared.args) - len(declared.defaults)) + [*declared.defaults, *declared.kw_defaults]
    taken = ", ".join(ast.unparse(one) for one in every) or "nothing"
    unknown = [name for name in given if name not in {one.arg for one in every}]
    rule = f"{model.module} has no such argument; it takes {taken}"
    wrong = [f"model.{name} = {given[name]!r}: {rule}" for name in unknown]
    arguments = dict[str, Any]()
    for parameter, default in zip(every, defaults, strict=True):
        name, text = parameter.arg, ast.unparse(parameter)
        kind = _kind_of(parameter.annotation)
        if name in OF_MODULE and name != "block_size":
            wrong.append(f"{model.module}: its argument {name} has the name of a key of [model]; rename it")
        elif kind is None:
            wrong.append(f"{model.module}: its argument {text} has no type that a configuration has; rule: {_RULE}")
        elif name in given:
            try:
                arguments[name] = _typed(kind, given[name])
            except (ValueError, TypeError, OverflowError):
                wrong.append(f"model.{name} = {given[name]!r}: must be {text}, as {model.module} declares it")
        elif default is None and name not in FILLED_IN:
            wrong.append(f"model.{name}: missing; {model.module} takes {text}")
        elif default is not None and name not in FILLED_IN:
            with suppress(ValueError, TypeError, OverflowError):  # no literal of its type: the file's own affair
                arguments[name] = _typed(kind, ast.literal_eval(default))
    if wrong:
        raise InvalidConfiguration("\n".join(wrong))
    return arguments


def _kind_of(annotation: ast.expr | None) -> Any:
    """Return the type that an annotation means, None for one that no configuration has; nothing of it runs."""
    with suppress(KeyError, TypeError, ValueError):
        match annotation:
            case ast.Name(id=name):
                return _PLAIN[name]
            case ast.BinOp(one, ast.BitOr(), ast.Constant(None)) | ast.Subscript(ast.Name("Optional"), one):
                return _kind_of(one) | None
            case ast.Subscript(value=ast.Name(id="list"), slice=ast.Name(id=name)):
                return GenericAlias(list, (_PLAIN[name],))
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                values = ast.literal_eval(inner)
                return Literal[values]
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
                named = [ast.unparse(one) for one in parts]
                return GenericAlias(tuple, tuple(... if one == "..." else _PLAIN[one] for one in named))
    return None


def _typed(kind: Any, value: object) -> Any:
    """Return the value as one of this type that JSON holds; raises as the two that find out do."""
    return TypeAdapter(kind).validate_json(codec.encode(value), strict=True)


def _refusal(model: ModelConfig, problem: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"model.module = {model.module!r}: {problem}")
