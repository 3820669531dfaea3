"""The commands about runs: lists, reports, plots, SQL, verification, sweeps and simulations."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.options import Flag, JsonOption, StoreOption, WhyOption, open_chosen_store, open_run_log
from cairn.cli.tables import describe_deletion, print_replay, print_rows, print_simulation, print_status, print_sweep
from reports.queries import display_tables
from reports.queries.simulation_options import SimulationOptions
from tasks.errors import InvalidConfiguration
from tasks.policy.termination import ExitCode
from tasks.text.output import output_columns, print_document, print_line, print_table, say

QueryArgument = Annotated[str, Parameter(allow_leading_hyphen=True)]  # SQL may begin with a comment


def runs(*, archived: Flag = False, store: StoreOption = "", json: JsonOption = False) -> None:
    """List the runs of the store.

    Args:
        archived: list those that were deleted instead: their logs, receipts and curves are still there.
    """
    from reports.queries.run_status import RunPhase, list_runs

    found = list_runs(open_chosen_store(store))
    rows = tuple(row for row in found if (row.state == RunPhase.DELETED) is archived)
    print_document(rows) if json else print_rows(display_tables.runs_table(rows, archived=archived))


def status(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show where a run stands: state, step, owner, budgets left, what happens next."""
    from reports.queries.run_status import read_status

    view = read_status(open_run_log(store, run))
    print_document(view) if json else print_status(view)


def attempts(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the receipt of every attempt: what it did, why it ended, what it cost, what was decided."""
    from reports.queries.receipts import read_receipts

    receipts = read_receipts(open_run_log(store, run))
    print_document(receipts) if json else print_rows(display_tables.receipts_table(receipts))


def checkpoints(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every checkpoint with its state, those still being written too."""
    from reports.queries.checkpoints import read_checkpoints

    found = read_checkpoints(open_run_log(store, run))
    print_document(found) if json else print_rows(display_tables.checkpoints_table(found))


def evaluations(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every evaluation, recorded or failed."""
    from reports.queries.evaluations import list_evaluations

    found = list_evaluations(open_run_log(store, run).state)
    print_document(found) if json else print_rows(display_tables.evaluations_table(found))


def explain(run: str, *, attempt: int | None = None, store: StoreOption = "", json: JsonOption = False) -> None:
    """Explain one attempt to a reader who knows nothing of the run: what happened, why, what it cost, what was done.

    Args:
        attempt: which one [the newest that did not complete, else the newest].
    """
    from reports.explain.post_mortem_facts import gather_post_mortem
    from reports.explain.post_mortem_text import post_mortem_lines

    facts = gather_post_mortem(open_run_log(store, run), attempt)
    print_document(facts) if json else print_line("\n".join(post_mortem_lines(facts, output_columns())))


def log(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the run log, entry by entry; --json prints them whole."""
    entries = open_run_log(store, run).read_entries()
    print_document(entries) if json else print_rows(display_tables.entries_table(entries))


def report(run: str, *, html: str = "", store: StoreOption = "", json: JsonOption = False) -> None:
    """Report a run from its opening to now: curve, attempts, why they ended, cost, evaluations.

    Args:
        html: write one self-contained page to this file, with the plot of the run; it is replaced where it exists
            [Markdown on stdout].
    """
    from reports.pages.report_pages import markdown_report, write_html_report
    from reports.pages.run_report import gather_report

    gathered, curves = gather_report(open_run_log(store, run), os.environ)
    if html:
        written = write_html_report(gathered, curves, html)
        say(f"run {run} up to step {gathered.status.step:,}: {html} ({written:,} bytes)")
    if json:
        print_document(gathered)
    elif not html:
        print(markdown_report(gathered, columns=output_columns() if sys.stdout.isatty() else None))


def plot(
    run: str,
    file: str,
    *,
    width: int = 1200,
    height: int = 900,
    x: Literal["step", "tokens"] = "step",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Draw a run into a file: losses, learning rate, gradient norm, speed, and where and why attempts ended.

    Args:
        file: a .png or .svg; it is replaced where it exists.
        width: pixels [1200].
        height: pixels [900].
        x: what the axis at the bottom counts; the other one is at the top [step].
    """
    from pathlib import Path

    from reports.plots.run_plot import PlotRequest, plot_run

    request = PlotRequest(file=Path(file), width_px=width, height_px=height, across=x)
    view = plot_run(open_run_log(store, run), request)
    print_document(view) if json else print(f"run {run} up to step {view.last_step:,}: {file} ({view.bytes:,} bytes)")


def compare(
    *runs: str,
    png: str = "",
    x: Literal["step", "tokens", "time"] = "step",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Compare runs, the least held-out loss first: what differs of their configurations, losses, metrics and cost.

    Args:
        runs: two runs or more, or the name of a set of runs.
        png: draw the losses over each other into this .png or .svg; it is replaced where it exists.
        x: what the axis of the plot counts; time is that of training, without what was trained again [step].
    """
    from pathlib import Path

    from reports.plots.run_plot import PlotRequest
    from reports.queries.run_comparison import compare_runs, find_runs

    if not runs:
        raise InvalidConfiguration("compare: names no run; `cairn runs` lists them")
    request = PlotRequest(file=Path(png), width_px=1200, height_px=800, across="step") if png else None
    logs = find_runs(open_chosen_store(store), runs)
    view = compare_runs(logs)
    if request is not None:
        from reports.plots.comparison_plot import plot_comparison

        say(f"{len(logs)} runs: {png} ({plot_comparison(logs, request, x):,} bytes)")
    if json:
        print_document(view)
        return
    print_rows(display_tables.compared_runs_table(view))
    if (losses := display_tables.held_out_table(view)).rows:
        print()
        print_rows(losses)


def diagnose(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Say what the loss curve looks like, the numbers that say so, and the usual cures.

    The verdict is healthy, too-early, plateau, spiking, overfitting, stuck or diverging.
    """
    from reports.queries.run_diagnosis import diagnose_run, print_diagnosis

    view = diagnose_run(open_run_log(store, run))
    print_document(view) if json else print_diagnosis(view)


def verify(run: str, *, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Re-hash everything a run has committed and check all aliases; exit 5 names what does not match."""
    from cairn.operations.run_verification import verify_run

    found = verify_run(open_chosen_store(store), run)
    for problem in found.problems:
        say(f"cairn: {problem}")
    if json:
        print_document(found)
    elif not found.problems:
        print(
            f"run {run}: {found.entries} entries, {found.checkpoints} checkpoints ({found.checkpoint_bytes:,} bytes) ok"
        )
    return ExitCode.INTEGRITY if found.problems else ExitCode.DONE


def replay(
    run: str,
    *,
    from_step: Annotated[int, Parameter(name="--from")] = 0,
    to_step: Annotated[int | None, Parameter(name="--to")] = None,
    sample: str = "",
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Train committed segments of a run again from the store alone and compare digests; exit 5 names what differs.

    Needs no Prefect server and writes nothing into the store. Exit 2 if nothing could be recomputed here.

    Args:
        from_step: only segments that train a step after this one [0].
        to_step: only segments that train a step up to this one [the last].
        sample: a percentage of the segments, such as 5%, at least one, the same at every call [all].
    """
    from cairn.operations.replay_plan import choose_segments, parse_sample

    percent = parse_sample(sample)
    if to_step is not None and to_step <= from_step:
        raise InvalidConfiguration(f"--from {from_step} --to {to_step}: must begin before it ends")
    log = open_run_log(store, run)
    from rich.console import Console

    from cairn.operations.run_replay import replay_run  # torch is imported only now that there is such a run
    from tasks.text.live_lines import LiveLines

    lines = LiveLines(Console(stderr=True), stays=False)
    with lines.show():
        found = replay_run(
            log,
            partial(choose_segments, run_id=run, from_step=from_step, to_step=to_step, percent=percent),
            on_segment=lambda done: lines.write([f"steps {done.from_step} to {done.to_step}: {done.verdict}"]),
        )
    for item in found.failed:
        say(f"cairn: run {run}, steps {item.from_step} to {item.to_step}: {item.verdict}: {item.why}")
    print_document(found) if json else print_replay(found)
    return found.exit_code


def simulate(
    run: str = "",
    *,
    options: Annotated[SimulationOptions, Parameter(name="*")] = SimulationOptions(),  # noqa: B008 (frozen)
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Try a policy on failures before they happen: a run's own, a file's rates, or Llama 3 405B's; nothing is trained.

    Args:
        run: the run whose receipts are replayed and whose configuration is tried.
    """
    from reports.queries.run_simulation import simulate_policies

    view = simulate_policies(options, state=open_run_log(store, run).state if run else None, environment=os.environ)
    print_document(view) if json else print_simulation(view)


def sweep(run: str, *, dry_run: Flag = False, store: StoreOption = "", json: JsonOption = False) -> None:
    """Apply retention and delete what is no longer needed; after a kill the same command goes on.

    Args:
        dry_run: say what would go, what stays, and why; change nothing.
    """
    from flows.operations.store_sweep import sweep_run_by_id

    report = sweep_run_by_id(open_chosen_store(store), run, dry_run=dry_run)
    print_document(report) if json else print_sweep(report)


def delete(
    run: str,
    *,
    yes: Flag = False,
    dry_run: Flag = False,
    why: WhyOption = "",
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Delete a run's checkpoints for good; its log, receipts and curve stay (`cairn runs --archived`).

    Asks on a terminal. Exit 3 if an alias or a fork needs the run, exit 7 if an attempt of it is alive; after a kill
    the same command goes on. Its data stays too: other runs may be built on it.

    Args:
        yes: do not ask; needed where there is no terminal.
        dry_run: say what would go; change nothing.
    """
    from cairn.operations.run_deletion import delete_as_person, preview_deletion

    found = open_run_log(store, run)
    view = preview_deletion(found)
    if not dry_run:
        if not yes and found.state.deleted is None:
            _ask_for_name(run, describe_deletion(view))
        view = delete_as_person(found, view, why)
    print_document(view) if json else print_line("\n".join(describe_deletion(view)))


def _ask_for_name(run: str, lines: Sequence[str]) -> None:
    """Raise `InvalidConfiguration` unless a person types the run's id on a terminal."""
    if not sys.stdin.isatty():
        raise InvalidConfiguration(f"delete {run}: there is no terminal to ask on; add --yes, or --dry-run to look")
    say("\n".join([*lines, f"type {run} to delete it:"]))
    if (answer := sys.stdin.readline().strip()) != run:
        raise InvalidConfiguration(f"{answer!r} is not {run!r}: nothing is deleted; the same command asks again")


def sql(query: QueryArgument = "", /, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Ask all runs of the store in SQL: training_attempts, checkpoints, evaluations, promotions, steps, runs.

    Without a query, list the columns of all tables. The SQL is DuckDB's; times are UTC; nothing but these tables can
    be read. Checkpoints that are still being written are no rows (`cairn checkpoints RUN` shows them).

        cairn sql "select termination_reason, count(*), sum(wasted_gpu_seconds) from training_attempts group by all"
        cairn sql "select run_id, step, train_loss from steps where run_id = 'bard' order by step" --json
        cairn sql "select run_id, config.training.lr, val_loss from runs order by val_loss" --json

    Args:
        query: one SELECT, or - to read it from standard input.
    """
    from cairn.cli.query_output import print_answer, print_json
    from reports.queries.run_query import answer_query, describe_tables
    from tasks.machine.placement import work_folder

    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        rows = describe_tables()
        if json:
            print_document([dict(zip(("table", "column", "type"), row, strict=True)) for row in rows])
        else:
            print_table(("table", "column", "type"), rows, empty="no tables")
        return
    with answer_query(open_chosen_store(store), text, work=work_folder(os.environ)) as found:
        for why in found.unreadable:
            say(f"cairn: left out: {why}")
        (print_json if json else print_answer)(found.columns, found.rows)
