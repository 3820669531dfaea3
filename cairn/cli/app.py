"""The cyclopts application that the verbs are registered on."""

from cyclopts import App, Parameter

from cairn.cli.verb_help import MORE, START_HERE


def _version() -> str:
    from importlib.metadata import version

    return f"cairn {version('cairn')}"


app = App(
    name="cairn",
    help="Trains GPTs on machines that will be taken away, and leaves tracks.",
    version=_version,
    help_format="plaintext",
    help_epilogue=START_HERE,
    group_commands=MORE,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(show_default=False),
)
