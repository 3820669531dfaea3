"""The command about the configuration: `config`."""

from typing import TYPE_CHECKING

from cairn.cli.options import JsonOption
from tasks.errors import InvalidConfiguration
from tasks.text.output import print_document, print_facts, print_table

if TYPE_CHECKING:
    from tasks.configuration.key_reference import ConfigurationKey


def config(key: str = "", *, json: JsonOption = False) -> None:
    """Explain the configuration keys: meaning, rule, unit, default, and whether they are frozen with the run.

    JSON: a list of key, meaning, unit, rule, default, frozen; of one key, its record.

    Args:
        key: a key such as training.lr, or a section such as training [all keys].
    """
    from tasks.configuration.broken_rules import unknown_key
    from tasks.configuration.key_reference import list_keys

    keys = [one for one in list_keys() if not key or f"{one.key}.".startswith(f"{key}.")]
    if not keys:
        raise InvalidConfiguration(f"{key}: {unknown_key(key, is_section='.' not in key)}")
    if len(keys) == 1:
        print_document(keys[0]) if json else print_facts(_facts(keys[0]))
    elif json:
        print_document(keys)
    else:
        print_table(("key", "default", "frozen", "meaning"), map(_row, keys), empty="no keys")


def _row(key: "ConfigurationKey") -> tuple[str, str, str, str]:
    return key.key, key.default, "yes" if key.frozen else "no", key.meaning


def _facts(key: "ConfigurationKey") -> tuple[tuple[str, object], ...]:
    frozen = (
        "yes: a run is continued only with the same value" if key.frozen else "no: it may change when a run goes on"
    )
    return (
        ("key", key.key),
        ("meaning", key.meaning),
        ("must be", key.rule),
        ("unit", key.unit or None),
        ("default", key.default),
        ("frozen", frozen),
    )


CONFIGURATION_COMMANDS = (config,)
