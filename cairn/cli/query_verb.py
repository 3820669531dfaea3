"""The verb `sql`: what a person types to ask all runs of a store at once.

Owns its options and its help. Refuses to know tables, files and the database.
"""

import os
import sys
from typing import Annotated

from cyclopts import Parameter

from cairn.cli.verb_options import JsonOption, StoreOption, opened_store
from tasks.errors import InvalidConfiguration
from tasks.text.output import print_document, print_table, say

QueryArgument = Annotated[str, Parameter(allow_leading_hyphen=True)]  # SQL may begin with a comment
CsvOption = Annotated[bool, Parameter(name="--csv", negative="", help="print CSV with a heading")]


def sql(
    query: QueryArgument = "", /, *, store: StoreOption = "", json: JsonOption = False, csv: CsvOption = False
) -> None:
    """Ask all runs of the store in SQL: training_attempts, checkpoints, evaluations, promotions, steps, runs.

    Without a query, list the columns of all tables. The SQL is DuckDB's; times are UTC; nothing but these tables can
    be read. Checkpoints that are still being written are no rows (`cairn checkpoints RUN` shows them).

        cairn sql "select termination_reason, count(*), sum(wasted_gpu_seconds) from training_attempts group by all"
        cairn sql "select run_id, step, train_loss from steps where run_id = 'bard' order by step" --csv > curve.csv
        cairn sql "select run_id, config.training.lr, val_loss from runs order by val_loss" --json

    Args:
        query: one SELECT, or - to read it from standard input.
    """
    if json and csv:
        raise InvalidConfiguration("--json and --csv: choose one")
    text = sys.stdin.read() if query == "-" else query
    if text.strip():
        _ask(text, store, json=json, csv=csv)
    else:
        _list_columns(json=json)


def _ask(text: str, store: str, *, json: bool, csv: bool) -> None:
    from cairn.cli.query_output import print_answer, print_csv, print_json
    from reports.queries.run_query import answered
    from tasks.machine.work_folder import work_folder

    with answered(opened_store(store), text, work=work_folder(os.environ)) as found:
        for why in found.unreadable:
            say(f"cairn: left out: {why}")
        write = print_json if json else print_csv if csv else print_answer
        write(found.columns, found.rows)


def _list_columns(*, json: bool) -> None:
    from reports.queries.run_query import describe_tables

    rows = describe_tables()
    if json:
        print_document([dict(zip(("table", "column", "type"), row, strict=True)) for row in rows])
    else:
        print_table(("table", "column", "type"), rows, empty="no tables")
