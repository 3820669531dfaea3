"""The verbs that only read: what the store holds of runs and models, what a policy would do, how this machine stands.

Owns what a person types to look. Each verb imports what it needs when it runs, so that those that only read the log
touch neither torch nor the orchestrator and answer at once. Refuses to change a run or a model.
"""

import os
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.query_verb import sql
from cairn.cli.verb_options import JsonOption, StoreOption, opened_store
from reports.queries.simulation_options import SimulationOptions
from tasks.configuration.store_choice import choose_store
from tasks.policy.termination import ExitCode
from tasks.text.output import print_document, print_facts, say


def runs(*, store: StoreOption = "", json: JsonOption = False) -> None:
    """List all runs of the store."""
    from cairn.cli.tables import print_runs
    from reports.queries.run_status import view_runs

    rows = view_runs(opened_store(store))
    print_document(rows) if json else print_runs(rows)


def status(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show where a run stands: state, step, owner, budgets left, what happens next."""
    from cairn.cli.tables import print_status
    from reports.queries.run_lookup import find_run
    from reports.queries.run_status import view_status

    view = view_status(find_run(opened_store(store), run))
    print_document(view) if json else print_status(view)


def attempts(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the receipt of every attempt: what it did, why it ended, what it cost, what was decided."""
    from cairn.cli.tables import print_attempts
    from reports.queries.run_lookup import find_run
    from reports.queries.run_views import view_attempts

    views = view_attempts(find_run(opened_store(store), run))
    print_document(views) if json else print_attempts(views)


def checkpoints(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every checkpoint with its state, those still being written too."""
    from cairn.cli.tables import print_checkpoints
    from reports.queries.run_lookup import find_run
    from reports.queries.run_views import view_checkpoints

    views = view_checkpoints(find_run(opened_store(store), run))
    print_document(views) if json else print_checkpoints(views)


def evaluations(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every evaluation, recorded or failed."""
    from reports.pages.evaluation_tables import print_evaluations
    from reports.queries.run_lookup import find_run
    from reports.queries.run_views import view_evaluations

    views = view_evaluations(find_run(opened_store(store), run).state)
    print_document(views) if json else print_evaluations(views)


def explain(run: str, *, attempt: int | None = None, store: StoreOption = "", json: JsonOption = False) -> None:
    """Explain one attempt to somebody who knows nothing of the run: what happened, why, what it cost, what was done.

    JSON: run_id, model_family, run_state, run_attempts, total_steps, opened_at, next, budgets, receipt (as attempts
    prints it), config_changes, changed, quarantines, where, origin, progress, end, open, successor, evaluations,
    verdict, refused, stderr_tail.

    Args:
        attempt: which one [the newest that did not complete, else the newest].
    """
    from reports.explain.post_mortem_facts import gather_post_mortem
    from reports.explain.post_mortem_text import post_mortem_lines
    from reports.queries.run_lookup import find_run

    facts = gather_post_mortem(find_run(opened_store(store), run), attempt)
    print_document(facts) if json else print("\n".join(post_mortem_lines(facts)))


def log(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the run log, entry by entry; --json prints them whole."""
    from cairn.cli.tables import print_entries
    from reports.queries.run_lookup import find_run

    entries = find_run(opened_store(store), run).read_entries()
    print_document(entries) if json else print_entries(entries)


def models(
    *,
    history: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Show what every alias points at, and could be rolled back to; a star marks the present.

    Args:
        history: show every decision instead: promotions, also those gone back on, refusals with their gate, roll-backs.
    """
    from cairn.cli.model_tables import print_decisions, print_models
    from reports.queries.model_views import view_history, view_models

    if history:
        decisions = view_history(opened_store(store))
        print_document(decisions) if json else print_decisions(decisions)
        return
    views = view_models(opened_store(store))
    print_document(views) if json else print_models(views)


def report(run: str, *, html: str = "", store: StoreOption = "", json: JsonOption = False) -> None:
    """Report a run from its opening to now: curve, attempts, why they ended, cost, evaluations, how to make it again.

    JSON: run_id, newest_seq, model_family, opened_at, status, state_sha256, best, verdict, cost, reasons, attempts,
    curve, held_out, evaluations, checkpoints, promotions, data, machines, versions, reproduction.

    Args:
        html: write one self-contained page to this file, with the picture of the run; it is replaced where it exists
            [Markdown on stdout].
    """
    from reports.pages.report_pages import markdown_report, write_html_report
    from reports.pages.run_report import gather_report
    from reports.queries.run_lookup import find_run

    gathered, curves = gather_report(find_run(opened_store(store), run), os.environ)
    if html:
        written = write_html_report(gathered, curves, html)
        say(f"run {run} up to step {gathered.status.step:,}: {html} ({written:,} bytes)")
    if json:
        print_document(gathered)
    elif not html:
        print(markdown_report(gathered))


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

    JSON: run_id, file, bytes, sha256, width_px, height_px, last_step, attempts, interruptions (attempts by the reason
    they ended for, without completed).

    Args:
        file: a .png or .svg; it is replaced where it exists.
        width: pixels [1200].
        height: pixels [900].
        x: what the axis at the bottom counts; the other one is at the top [step].
    """
    from pathlib import Path

    from reports.plots.run_plot import PlotRequest, plot_run
    from reports.queries.run_lookup import find_run

    request = PlotRequest(file=Path(file), width_px=width, height_px=height, across=x)
    view = plot_run(find_run(opened_store(store), run), request)
    print_document(view) if json else print(f"run {run} up to step {view.last_step:,}: {file} ({view.bytes:,} bytes)")


def diagnose(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Say what the loss curve looks like, the numbers that say so, and the usual cures.

    JSON: run_id, step, total_steps, verdict (healthy, too-early, plateau, spiking, overfitting, stuck, diverging), why,
    numbers, cures, stopped_early, evaluations (step, val_loss, train_loss, kind, why of each).
    """
    from reports.queries.run_diagnosis import diagnose_run, print_diagnosis
    from reports.queries.run_lookup import find_run

    view = diagnose_run(find_run(opened_store(store), run))
    print_document(view) if json else print_diagnosis(view)


def verify(run: str, *, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Re-hash everything a run has committed; exit 5 names what is not what it must be."""
    from cairn.operations.run_verification import verify_run

    found = verify_run(opened_store(store), run)
    for problem in found.problems:
        say(f"cairn: {problem}")
    if json:
        print_document(found)
    elif not found.problems:
        print(
            f"run {run}: {found.entries} entries, {found.checkpoints} checkpoints ({found.checkpoint_bytes:,} bytes) ok"
        )
    return ExitCode.INTEGRITY if found.problems else ExitCode.DONE


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
    from cairn.cli.tables import print_simulation
    from reports.queries.run_lookup import find_run
    from reports.queries.run_simulation import simulate_policies

    view = simulate_policies(
        options, state=find_run(opened_store(store), run).state if run else None, environment=os.environ
    )
    print_document(view) if json else print_simulation(view)


def data(
    reference: Annotated[str, Parameter(help="a snapshot's id, at least 8 characters of it, or RUN")],
    *,
    window: int | None = None,
    split: Literal["train", "val"] = "train",
    block_size: int = 0,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Show what a data snapshot holds: sizes, sources, splits, tokenizer, what was left out, and where text comes from.

    JSON: snapshot_id, run_id, bytes, tokenizer_sha256, vocab_size, end_of_text_id, val_fraction, block_size, splits
    (documents, tokens, bytes, shards, windows of each), sources (name, bytes, sha256, unit, documents), rejected
    (documents by kind), windows (split, window, first_token, text, documents: source, offset_bytes, bytes, sha256,
    first_token).

    Args:
        window: show this window and the documents it comes from; without it, a few windows.
        split: the side the window is counted in.
        block_size: tokens of a window [the run's, else 256].
    """
    from cairn.cli.tables import print_data
    from reports.queries.data_view import WindowChoice, view_data
    from tasks.machine.work_folder import work_folder

    choice = WindowChoice(window=window, split=split, block_size=block_size)
    view = view_data(opened_store(store), reference, choice, cache_dir=work_folder(os.environ) / "snapshots")
    print_document(view) if json else print_data(view)


def doctor(*, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Look at versions, device, store, orchestrator and disk; exit 1 when something is wrong."""
    from cairn.operations.machine_check import check_machine

    checks = check_machine(choose_store(store, os.environ))
    if json:
        print_document(checks)
    else:
        print_facts((f"{'ok   ' if check.ok else 'WRONG'} {check.name}", check.detail) for check in checks)
    return ExitCode.DONE if all(check.ok for check in checks) else ExitCode.ERROR


READING_VERBS = (
    runs,
    status,
    attempts,
    checkpoints,
    evaluations,
    explain,
    log,
    sql,
    models,
    report,
    plot,
    diagnose,
    verify,
    simulate,
    data,
    doctor,
)
