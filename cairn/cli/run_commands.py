"""The commands that read runs: lists, reports, plots, SQL and simulations."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.app import Flag, Json, Url, open_chosen_store, open_run_log
from cairn.cli.texts import draw_runs, note_no_runs, print_answer, print_blocks, print_json
from cairn.reports.queries import run_comparison, run_lookup, run_status
from cairn.reports.queries.receipts import read_receipts
from cairn.reports.queries.simulation_options import SimulationOptions
from cairn.reports.text import answer_text, display_tables
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import work_folder
from cairn.tasks.text.output import output_columns, print_document, print_table, say

Axis = Literal["step", "tokens"]
ComparedAxis = Literal["step", "tokens", "time"]
Query = Annotated[str, Parameter(allow_leading_hyphen=True)]  # SQL may begin with a comment
Options = Annotated[SimulationOptions, Parameter(name="*")]


def runs(*, archived: Flag = False, store: Url = "", json: Json = False) -> None:
    """List the runs of the store.

    Args:
        archived: list those that were deleted instead: their logs, receipts and curves are still there.

    Examples:
        cairn runs
        cairn runs --archived
        cairn runs --store s3://bucket/cairn --json
    """
    listed = run_status.list_runs(chosen := open_chosen_store(store))
    rows = tuple(row for row in listed if (row.state == run_status.RunPhase.DELETED) is archived)
    note_no_runs(chosen, listed)
    others = f"no run was {'deleted here' if archived else 'left: `cairn runs --archived` lists those deleted'}"
    empty = others if listed else "no runs"
    print_document(rows) if json else print_blocks(display_tables.runs_table(rows, empty=empty))


def status(run: str, *, store: Url = "", json: Json = False) -> None:
    """Show a run's state, step, owner, budgets left and next action.

    Examples:
        cairn status quickstart
        cairn status quickstart --json
    """
    view = run_status.read_status(open_run_log(store, run))
    print_document(view) if json else print_blocks(answer_text.status_facts(view))


def attempts(run: str, *, store: Url = "", json: Json = False) -> None:
    """Show the receipt of every attempt: its steps, its end and the reason, its cost, the decision.

    Examples:
        cairn attempts quickstart
        cairn attempts quickstart --json
    """
    log = open_run_log(store, run)
    receipts = read_receipts(log, run_lookup.read_beat(log))
    print_document(receipts) if json else print_blocks(display_tables.receipts_table(receipts))


def checkpoints(run: str, *, store: Url = "", json: Json = False) -> None:
    """Show every checkpoint with its state, those still being written too.

    Examples:
        cairn checkpoints quickstart
        cairn checkpoints quickstart --json
    """
    found = run_lookup.read_checkpoints(open_run_log(store, run))
    print_document(found) if json else print_blocks(display_tables.checkpoints_table(found))


def evaluations(run: str, *, store: Url = "", json: Json = False) -> None:
    """Show every evaluation, recorded or failed.

    Examples:
        cairn evaluations quickstart
        cairn evaluations quickstart --json
    """
    from cairn.reports.queries.evaluations import list_evaluations

    found = list_evaluations(open_run_log(store, run).state)
    print_document(found) if json else print_blocks(display_tables.evaluations_table(found))


def explain(run: str, *, attempt: int | None = None, store: Url = "", json: Json = False) -> None:
    """Explain one attempt to a reader who knows nothing of the run: its end, the cause, the cost, the decision.

    Args:
        attempt: which one [the newest that did not complete, else the newest].

    Examples:
        cairn explain quickstart
        cairn explain quickstart --attempt 3
    """
    from cairn.reports.queries.post_mortem import gather_post_mortem
    from cairn.reports.text.post_mortem_text import post_mortem_blocks

    facts = gather_post_mortem(open_run_log(store, run), attempt)
    print_document(facts) if json else print_blocks(*post_mortem_blocks(facts))


def log(run: str, *, store: Url = "", json: Json = False) -> None:
    """Show the run log, entry by entry; --json prints them whole.

    Examples:
        cairn log quickstart
        cairn log quickstart --json
    """
    entries = open_run_log(store, run).read_entries()
    print_document(entries) if json else print_blocks(display_tables.entries_table(entries))


def report(run: str, *, html: str = "", store: Url = "", json: Json = False) -> None:
    """Report a run from its opening to now: curve, attempts, why they ended, cost, evaluations.

    Args:
        html: write one self-contained page to this file, with the plot of the run; it is replaced where it exists
            [Markdown on stdout].

    Examples:
        cairn report quickstart
        cairn report quickstart --html report.html
    """
    from cairn.reports.pages import report_pages, run_report
    from cairn.reports.plots import run_curves

    gathered, curves = run_report.gather_report(open_run_log(store, run), os.environ)
    if html:
        written = run_curves.write_output(Path(html), report_pages.html_report(gathered, curves).encode())
        say(f"run {run} up to step {gathered.status.step:,}: {html} ({written:,} bytes)")
    if json:
        print_document(gathered)
    elif not html:
        print(report_pages.markdown_report(gathered, columns=output_columns() if sys.stdout.isatty() else None))


def plot(
    run: str, file: str, *, width: int = 1200, height: int = 900, x: Axis = "step", store: Url = "", json: Json = False
) -> None:
    """Draw a run into a file: losses, learning rate, gradient norm, speed, and where and why attempts ended.

    Args:
        file: a .png or .svg; it is replaced where it exists.
        width: pixels [1200].
        height: pixels [900].
        x: what the axis at the bottom counts; the other one is at the top [step].

    Examples:
        cairn plot quickstart curve.png
        cairn plot quickstart curve.svg --x tokens
    """
    from cairn.reports.plots.curve_plot import plot_run

    view = plot_run(open_run_log(store, run), Path(file), width_px=width, height_px=height, across=x)
    print_document(view) if json else print(f"run {run} up to step {view.last_step:,}: {file} ({view.bytes:,} bytes)")


def compare(*runs: str, png: str = "", x: ComparedAxis = "step", store: Url = "", json: Json = False) -> None:
    """Compare runs, the least held-out loss first: the settings that differ, losses, metrics and cost.

    Args:
        runs: two runs or more, or the name of a set of runs.
        png: draw the losses over each other into this .png or .svg; it is replaced where it exists.
        x: what the axis of the plot counts; time is that of training, without what was trained again [step].

    Examples:
        cairn compare quickstart longer
        cairn compare rates --png rates.png --x tokens
    """
    if not runs:
        raise InvalidConfiguration("compare: names no run; `cairn runs` lists them")
    logs = run_comparison.find_runs(open_chosen_store(store), runs)
    view = run_comparison.compare_runs(logs)
    if png:
        draw_runs(logs, png, x)
    losses = display_tables.held_out_table(view)
    below: tuple[answer_text.Block, ...] = ("", losses) if losses.rows else ()
    print_document(view) if json else print_blocks(display_tables.compared_runs_table(view), *below)


def diagnose(run: str, *, store: Url = "", json: Json = False) -> None:
    """Judge the loss curve: a verdict, the numbers behind it, and the usual cures.

    The verdict is healthy, too-early, plateau, spiking, clipping, repeating, slow, straggling, overfitting, stuck or
    diverging.

    Examples:
        cairn diagnose quickstart
        cairn diagnose quickstart --json
    """
    from cairn.reports.queries.evaluations import diagnose_run

    view = diagnose_run(open_run_log(store, run))
    print_document(view) if json else print_blocks(*answer_text.diagnosis_blocks(view))


def simulate(run: str = "", *, options: Options = SimulationOptions(), store: Url = "", json: Json = False) -> None:
    """Try a policy on failures before they happen: a run's own, a file's rates, or Llama 3 405B's; nothing is trained.

    Args:
        run: the run whose receipts are replayed and whose configuration is tried.

    Examples:
        cairn simulate quickstart --days 60
        cairn simulate --config run.toml --trace rates.toml --devices 512
    """
    from cairn.reports.queries.run_simulation import simulate_policies

    view = simulate_policies(options, state=open_run_log(store, run).state if run else None, environment=os.environ)
    print_document(view) if json else print_blocks(*answer_text.simulation_blocks(view))


def sql(query: Query = "", /, *, store: Url = "", json: Json = False) -> None:
    """Ask all runs of the store in SQL: training_attempts, checkpoints, evaluations, notes, promotions, steps, runs.

    Without a query, list the columns of all tables, `hosts` too. The SQL is DuckDB's; times are UTC; nothing but these
    tables can be read. Checkpoints that are still being written are no rows (`cairn checkpoints RUN` shows them).

        cairn sql "select termination_reason, count(*), sum(wasted_gpu_seconds) from training_attempts group by all"
        cairn sql "select run_id, step, train_loss from steps where run_id = 'bard' order by step" --json
        cairn sql "select run_id, config.training.lr, val_loss from runs order by val_loss" --json

    Args:
        query: one SELECT, or - to read it from standard input.

    Examples:
        cairn sql "select run_id, state, step from runs"
    """
    from cairn.reports.queries.run_query import answer_query, describe_tables

    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        columns, rows = ("table", "column", "type"), describe_tables()
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        print_document(records) if json else print_table(columns, rows, empty="no tables")
        return
    note_no_runs(chosen := open_chosen_store(store))
    with answer_query(chosen, text, work=work_folder(os.environ)) as found:
        for why in found.unreadable:
            say(f"cairn: left out: {why}")
        (print_json if json else print_answer)(found.columns, found.rows)
