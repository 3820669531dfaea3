"""A parser that never comes to an end."""


def run() -> None:
    """Go on for ever."""
    while True:
        pass
