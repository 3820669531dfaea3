"""The launcher of ranks that are victims (`python -m tests.programs.chaos.rank_launcher`)."""

from tests.programs.chaos.rank_victim import launch


def main() -> None:
    """Launch them."""
    launch()


if __name__ == "__main__":
    main()
