"""The page docs/reference/configuration.md."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from cairn.tasks.configuration.key_reference import ConfigurationKey, keys_by_name, section_meanings

_HEAD = """# Configuration keys

`make docs` writes this page from the descriptions beside the fields in the code; `cairn config [KEY]` prints the same.

A configuration is a TOML file. `CAIRN_SECTION__KEY` in the environment overrides the file, `--set section.key=value`
overrides both. Frozen keys decide which run it is: a run that exists is continued only with the same values.
"""
_COLUMNS = "| key | meaning | value | default | frozen |\n|---|---|---|---|---|"
_ANY_REASON = "budgets.<reason>"


def configuration_page() -> str:
    """Return all sections with their keys as Markdown."""
    lines, lists = [_HEAD], set(keys_by_name())
    for section, keys in _sections():
        title = (f"`[[{section}]]`" if section in lists else f"`[{section}]`") if section else "Outside of all sections"
        meaning = section_meanings().get(section.removesuffix(".<reason>"))
        lines += [f"## {title}", "", *([meaning, ""] if meaning else []), _COLUMNS, *map(_row, keys), ""]
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, Sequence[ConfigurationKey]]]:
    """Yield sections with their keys; the budgets, which differ in their defaults only, are one section."""
    yield "", [key for key in keys_by_name().values() if not key.section]
    budgets = [key for key in keys_by_name().values() if key.section.startswith("budgets.")]
    for section, keys in groupby((key for key in keys_by_name().values() if key.section), key=lambda key: key.section):
        if not section.startswith("budgets."):
            yield section, list(keys)
        elif section == budgets[0].section:
            yield _ANY_REASON, [_of_any_reason(key.name, budgets) for key in keys]


def _of_any_reason(name: str, budgets: Sequence[ConfigurationKey]) -> ConfigurationKey:
    same = [key for key in budgets if key.name == name]
    defaults = [key.default for key in same]
    usual = max(defaults, key=defaults.count) if len(set(defaults)) < len(defaults) - 1 else ""
    others = [f"{key.default} for {key.section.partition('.')[2]}" for key in same if key.default != usual]
    return replace(same[0], key=f"{_ANY_REASON}.{name}", default=", ".join([usual, *others] if usual else others))


def _row(key: ConfigurationKey) -> str:
    value = f"{key.rule}, in {key.unit}" if key.unit else key.rule
    cells = (key.meaning, value, key.default, "yes" if key.frozen else "no")
    return f"| `{key.key}` | {' | '.join(cell.replace('|', '&#124;').replace('<', '&lt;') for cell in cells)} |"
