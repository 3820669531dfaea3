"""The `cairn` command: verbs, options, exit codes.

Owns what a person types. Each verb imports what it needs when it runs: those that only read touch neither torch nor
the orchestrator and answer at once. Refuses to know how anything is done.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from flows.exit_code import EXPECTED_ERRORS, ExitCode, code_of_error
from flows.output import print_document, print_facts, say
from flows.simulation_options import SimulationOptions
from flows.store_choice import choose_store

if TYPE_CHECKING:
    from storage.object_store import ObjectStore

StoreOption = Annotated[str, Parameter(name="--store", help="folder or URL of the store [CAIRN_STORE, ./cairn-store]")]
JsonOption = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
AliasOption = Annotated[str, Parameter(name="--alias", help="the name that points at a checkpoint")]
Reference = Annotated[str, Parameter(help="an alias such as champion, RUN, or RUN@STEP")]
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", negative="", help="section.key=value; may be repeated")]


def _version() -> str:
    from importlib.metadata import version

    return f"cairn {version('cairn')}"


app = App(
    name="cairn",
    help="Trains GPTs on machines that will be taken away, and leaves tracks.",
    version=_version,
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(show_default=False),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code and prints errors as a person wants to read them."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        say(f"cairn: {error}\nsee `cairn --help` or `cairn VERB --help`")
        return ExitCode.USAGE
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except (KeyboardInterrupt, Exception) as error:
        return _explained(error)
    return code if isinstance(code, int) else ExitCode.DONE


def _explained(error: BaseException) -> ExitCode:
    expected = isinstance(error, (*EXPECTED_ERRORS, KeyboardInterrupt))
    if not expected or os.environ.get("CAIRN_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        say("interrupted; the same command continues")
    elif expected:
        say(f"cairn: {error}")
    return code_of_error(error)


def _open(store: str) -> "ObjectStore":
    from storage.open_store import open_store

    return open_store(choose_store(store, os.environ))


@app.command
def train(
    config: str = "",
    *,
    run_id: str = "",
    set_: Overrides = (),
    start_over: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> ExitCode:
    """Train a run to its end, or continue it: the same command again goes on from the newest commit.

    Args:
        config: path of the run configuration (TOML); may be left out for a run that exists.
        run_id: name of the run [the configuration file's name].
        start_over: where a run has commits and none can be read any more, begin again at step 0 instead of exit 5.
    """
    from flows.prefect_session import Terminated, run_train_gpt, terminable
    from flows.preflight import TrainingRequest, check_before_start, named_run
    from flows.run_lookup import find_run
    from flows.run_status import view_status
    from flows.training_summary import summarize

    request = TrainingRequest(config=config, run_id=run_id, overrides=set_, start_over=start_over)
    try:
        with terminable():
            configuration = check_before_start(_open(store), request, os.environ)
            end = run_train_gpt(request, choose_store(store, os.environ), say=say)
    except Terminated:
        say("preempted; the same command continues")
        return ExitCode.PREEMPTED
    log = find_run(_open(store), named_run(request))
    if end.code is ExitCode.DONE:
        for line in summarize(log, configuration, ending=end.message, store_option=store):
            say(line)
    else:
        say(f"cairn: {end.message}")
    if json:
        print_document(view_status(log))
    return end.code


@app.command
def runs(*, store: StoreOption = "", json: JsonOption = False) -> None:
    """List all runs of the store."""
    from flows.run_status import view_runs
    from flows.tables import print_runs

    rows = view_runs(_open(store))
    print_document(rows) if json else print_runs(rows)


@app.command
def status(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show where a run stands: state, step, owner, budgets left, what happens next."""
    from flows.run_lookup import find_run
    from flows.run_status import view_status
    from flows.tables import print_status

    view = view_status(find_run(_open(store), run))
    print_document(view) if json else print_status(view)


@app.command
def attempts(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the receipt of every attempt: what it did, why it ended, what it cost, what was decided."""
    from flows.run_lookup import find_run
    from flows.run_views import view_attempts
    from flows.tables import print_attempts

    views = view_attempts(find_run(_open(store), run))
    print_document(views) if json else print_attempts(views)


@app.command
def checkpoints(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every checkpoint with its state, those still being written too."""
    from flows.run_lookup import find_run
    from flows.run_views import view_checkpoints
    from flows.tables import print_checkpoints

    views = view_checkpoints(find_run(_open(store), run))
    print_document(views) if json else print_checkpoints(views)


@app.command
def evaluations(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show every evaluation, recorded or failed."""
    from flows.run_lookup import find_run
    from flows.run_views import view_evaluations
    from flows.tables import print_evaluations

    views = view_evaluations(find_run(_open(store), run).state)
    print_document(views) if json else print_evaluations(views)


@app.command
def log(run: str, *, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show the run log, entry by entry; --json prints them whole."""
    from flows.run_lookup import find_run
    from flows.tables import print_entries

    entries = find_run(_open(store), run).read_entries()
    print_document(entries) if json else print_entries(entries)


@app.command
def models(*, store: StoreOption = "", json: JsonOption = False) -> None:
    """Show what every alias points at, and pointed at before; a star marks the present."""
    from flows.model_views import view_models
    from flows.tables import print_models

    views = view_models(_open(store))
    print_document(views) if json else print_models(views)


@app.command
def verify(run: str, *, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Re-hash everything a run has committed; exit 5 names what is not what it must be."""
    from flows.run_verification import verify_run

    found = verify_run(_open(store), run)
    for problem in found.problems:
        say(f"cairn: {problem}")
    if json:
        print_document(found)
    elif not found.problems:
        print(
            f"run {run}: {found.entries} entries, {found.checkpoints} checkpoints ({found.checkpoint_bytes:,} bytes) ok"
        )
    return ExitCode.INTEGRITY if found.problems else ExitCode.DONE


@app.command
def sweep(
    run: str,
    *,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Apply retention and delete what nobody needs any more; killed anywhere, the same command goes on.

    Args:
        dry_run: say what would go, what stays, and why; change nothing.
    """
    from flows.run_sweep import sweep_one
    from flows.tables import print_sweep

    report = sweep_one(_open(store), run, dry_run=dry_run)
    print_document(report) if json else print_sweep(report)


@app.command
def evaluate(reference: Reference, *, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Measure a committed checkpoint under its run's suite, in a process of its own; nothing is trained."""
    from flows.checkpoint_use import measure
    from flows.run_lookup import find_checkpoint
    from flows.run_views import view_evaluation
    from flows.tables import print_evaluations

    view = view_evaluation(measure(find_checkpoint(_open(store), reference)))
    print_document(view) if json else print_evaluations([view])
    return ExitCode.DONE if view.status == "recorded" else ExitCode.ERROR


@app.command
def promote(
    reference: Reference, *, alias: AliasOption = "champion", store: StoreOption = "", json: JsonOption = False
) -> None:
    """Offer a checkpoint to an alias: the gates decide, the decision is recorded, exit 3 is a no."""
    from flows.checkpoint_use import offer_to
    from flows.model_views import view_alias
    from flows.run_lookup import find_checkpoint
    from flows.tables import print_models

    views = view_alias(alias, offer_to(find_checkpoint(_open(store), reference), alias))[:1]
    print_document(views[0]) if json else print_models(views)


@app.command
def rollback(*, alias: AliasOption = "champion", store: StoreOption = "", json: JsonOption = False) -> None:
    """Point an alias back at what it pointed at before; the decision is recorded."""
    from flows.checkpoint_use import this_person
    from flows.model_views import roll_back
    from flows.tables import print_models

    view = roll_back(_open(store), alias, by=this_person())
    print_document(view) if json else print_models([view])


@app.command
def sample(
    reference: Reference,
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    store: StoreOption = "",
    json: JsonOption = False,
) -> None:
    """Let a committed checkpoint write.

    Args:
        prompt: what the text begins with.
        tokens: how many tokens follow.
        temperature: 0 takes the likeliest token each time.
        top_k: draw from this many likeliest tokens; 0 leaves all in.
        seed: equal seeds give equal text.
    """
    from flows.checkpoint_use import SampleRequest, write_sample
    from flows.run_lookup import find_checkpoint

    request = SampleRequest(prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    written = write_sample(find_checkpoint(_open(store), reference), request)
    print_document(written) if json else print(f"{written.prompt}{written.text}")


@app.command
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
    from flows.run_lookup import find_run
    from flows.run_simulation import simulate_policies
    from flows.tables import print_simulation

    view = simulate_policies(options, state=find_run(_open(store), run).state if run else None, environment=os.environ)
    print_document(view) if json else print_simulation(view)


@app.command
def doctor(*, store: StoreOption = "", json: JsonOption = False) -> ExitCode:
    """Look at versions, device, store, orchestrator and disk; exit 1 when something is wrong."""
    from flows.machine_check import check_machine

    checks = check_machine(choose_store(store, os.environ))
    if json:
        print_document(checks)
    else:
        print_facts((f"{'ok   ' if check.ok else 'WRONG'} {check.name}", check.detail) for check in checks)
    return ExitCode.DONE if all(check.ok for check in checks) else ExitCode.ERROR


if __name__ == "__main__":
    main()
