"""The commands about store and machine: the live page, verification, replay, sweep, deletion, configuration, doctor."""

import os
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from cairn.cli.app import Flag, Json, Url, Why, app, open_chosen_store, open_run_log
from cairn.cli.texts import note_no_runs, print_blocks, print_replay
from cairn.tasks.configuration.addresses import choose_store
from cairn.tasks.errors import InvalidConfiguration
from cairn.tasks.machine.placement import usable_cores
from cairn.tasks.policy.termination import ExitCode
from cairn.tasks.text.format import format_duration, format_quantity
from cairn.tasks.text.output import print_document, print_facts, print_line, print_table, say

Shell = Literal["bash", "zsh", "fish"]
FromStep = Annotated[int, Parameter(name="--from")]
ToStep = Annotated[int | None, Parameter(name="--to")]
Tags = Annotated[tuple[str, ...], Parameter(negative="")]
Place = Annotated[str, Parameter(name="STORE")]
_DONE = {"keep": "kept", "unpin": "unpinned", "supersede": "superseded", "delete": "deleted", "discard": "discarded"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """A completion script, or where it was installed, and the shell's start-up file with the line that loads it."""

    shell: str
    script: str | None = None
    path: str | None = None
    startup: str | None = None


def ui(
    where: Place = "",
    *,
    port: int = 8460,
    metrics_token_file: str = "",
    prompts: Flag = False,
    store: Url = "",
    json: Json = False,
) -> None:
    """Serve the live page: all runs, one run as it trains, several over each other, models; Ctrl-C ends it.

    It reads the store alone, writes nothing but your notes, listens on 127.0.0.1, and answers with the token in the
    address that it prints. A child with bounded time and memory draws text from a checkpoint that you choose.

    Args:
        where: folder or URL of the store, as --store.
        port: where it listens; 0 is any that is free [8460].
        metrics_token_file: file with the token with which a monitor of any user reads /metrics [only the page's own].
        prompts: offer the prompt also for a bucket, and for a folder that others may write to.

    Examples:
        cairn ui
        cairn ui s3://bucket/cairn --port 9000
    """
    from cairn.ui import live_page, local_server

    def announce(found: live_page.LiveAddress) -> None:
        print_document(found) if json else print_line(f"{found.address} shows {found.store}; Ctrl-C ends it")
        sys.stdout.flush()
        note_no_runs(chosen)

    chosen = open_chosen_store(where or store)
    access = local_server.read_access(metrics_token_file)
    live_page.serve(chosen, port=port, access=access, prompts=prompts, announce=announce)


def config(key: str = "", *, json: Json = False) -> None:
    """Explain the configuration keys: meaning, rule, unit, default, and whether they are frozen with the run.

    Args:
        key: a key such as training.lr, whose record --json prints alone, or a section such as training [all keys].

    Examples:
        cairn config
        cairn config training
        cairn config training.lr --json
    """
    from cairn.tasks.configuration.key_reference import keys_by_name, unknown_key

    keys = [one for one in keys_by_name().values() if not key or f"{one.key}.".startswith(f"{key}.")]
    if not keys:
        raise InvalidConfiguration(f"{key}: {unknown_key(key, is_section='.' not in key)}")
    if json:
        print_document(keys[0] if len(keys) == 1 else keys)
    elif len(keys) == 1:
        (one,) = keys
        frozen = "yes: a run is continued only with the same value"
        facts = {"key": one.key, "meaning": one.meaning, "must be": one.rule, "unit": one.unit or None}
        facts |= {"default": one.default, "frozen": frozen if one.frozen else "no: it may change when a run goes on"}
        print_facts(facts.items())
    else:
        rows = [(one.key, one.default, "yes" if one.frozen else "no", one.meaning) for one in keys]
        print_table(("key", "default", "frozen", "meaning"), rows, empty="no keys")


def init(text: str = ".", *, json: Json = False) -> None:
    """Write a configuration for a text, of a size that trains in some five minutes on this machine.

    Args:
        text: a file, or a folder with texts [this folder]; the configuration is written beside it, none is overwritten.

    Examples:
        cairn init texts
        cairn init book.txt
    """
    from cairn.operations.first_configuration import write_first_configuration
    from cairn.tasks.machine.machine_speed import may_have_cuda

    made = write_first_configuration(Path(text), cores=usable_cores(), on_gpu=may_have_cuda())
    text_size, time = format_quantity(made.text_bytes), format_duration(made.seconds)
    line = f"{made.path}: {text_size} of text, {made.steps:,} steps, about {time} of training here"
    print_document(made) if json else print_blocks(line, f"train it: cairn train {shlex.quote(made.path)}")


def doctor(*, store: Url = "", json: Json = False) -> ExitCode:
    """Check versions, device, store, orchestrator and disk; exit 1 when something is wrong.

    Examples:
        cairn doctor
        cairn doctor --store s3://bucket/cairn
    """
    from cairn.operations.checks import check_machine

    checks = check_machine(choose_store(store, os.environ))
    facts = ((f"{'ok   ' if check.ok else 'WRONG'} {check.name}", check.detail) for check in checks)
    print_document(checks) if json else print_facts(facts)
    return ExitCode.DONE if all(check.ok for check in checks) else ExitCode.ERROR


def completion(shell: Shell | None = None, *, install: Flag = False, json: Json = False) -> None:
    """Print the script that completes commands and options in a shell, or install it.

    Args:
        shell: which one [the shell this is typed in].
        install: put the script where the shell reads it, and a line into ~/.bashrc or ~/.zshrc; a new shell has it.

    Examples:
        cairn completion --install
        cairn completion bash > cairn.bash
    """
    from cyclopts.completion import ShellDetectionError, detect_shell

    try:
        chosen = shell or detect_shell()
        if chosen == "powershell":
            raise ShellDetectionError("there is no completion for PowerShell")
        text = make_script(chosen)
        view = CompletionView(shell=chosen, script=text)
        if install:
            path = app.install_completion(shell=chosen)
            path.write_text(text, encoding="utf-8")
            startup = None if chosen == "fish" else str(Path.home() / f".{chosen}rc")
            loads = f", which a line in {startup} loads" if startup else ""
            text = f"installed: {path}{loads}; a new shell completes `cairn`"
            view = CompletionView(shell=chosen, path=str(path), startup=startup)
    except ShellDetectionError as error:
        raise InvalidConfiguration(f"{error}; name the shell: `cairn completion bash`, zsh or fish") from error
    except OSError as error:
        raise InvalidConfiguration(f"not installed: {error}; `cairn completion bash` prints the script") from error
    print_document(view) if json else print(text.rstrip("\n"))


def make_script(shell: Shell) -> str:
    """Return the library's script for a shell with two additions: RUN@STEP is one word, no space follows KEY=."""
    text = app.generate_completion(shell=shell)
    if shell == "zsh":
        text = text.replace("compadd -d", 'compadd -S "${${_cyc_vals[1]:#*[=/]}:+ }" -d')
    addition = Path(__file__).parent / "completions" / f"cairn.{shell}"
    return text + addition.read_text(encoding="utf-8") if addition.exists() else text


def verify(run: str, *, store: Url = "", json: Json = False) -> ExitCode:
    """Re-hash everything a run has committed and check all aliases; exit 5 names the differences.

    Examples:
        cairn verify quickstart
        cairn verify quickstart --json
    """
    from cairn.operations.checks import verify_run

    found = verify_run(open_chosen_store(store), run)
    for problem in found.problems:
        say(f"cairn: {problem}")
    if json:
        print_document(found)
    elif not found.problems:
        size = f"{found.checkpoint_bytes:,} bytes"
        print(f"run {run}: {found.entries} entries, {found.checkpoints} checkpoints ({size}) ok")
    return ExitCode.INTEGRITY if found.problems else ExitCode.DONE


def replay(
    run: str, *, from_step: FromStep = 0, to_step: ToStep = None, sample: str = "", store: Url = "", json: Json = False
) -> ExitCode:
    """Train committed segments of a run again from the store alone and compare digests; exit 5 names the differences.

    Needs no Prefect server and writes nothing into the store. Exit 2 if nothing could be recomputed here.

    Args:
        from_step: only segments that train a step after this one [0].
        to_step: only segments that train a step up to this one [the last].
        sample: a percentage of the segments, such as 5%, at least one, the same at every call [all].

    Examples:
        cairn replay quickstart --from 200 --to 400
        cairn replay quickstart --sample 5%
    """
    from cairn.operations.unrecorded_plan import choose_segments, parse_sample

    percent = parse_sample(sample)
    if to_step is not None and to_step <= from_step:
        raise InvalidConfiguration(f"--from {from_step} --to {to_step}: must begin before it ends")
    log = open_run_log(store, run)
    from cairn.operations.unrecorded_training import replay_run  # torch is imported only now that there is such a run
    from cairn.tasks.text.live_lines import LiveLines

    lines = LiveLines(stays=False)
    with lines.show():
        found = replay_run(
            log,
            partial(choose_segments, run_id=run, from_step=from_step, to_step=to_step, percent=percent),
            on_segment=lambda done: lines.write([f"steps {done.from_step} to {done.end.step}: {done.outcome}"]),
        )
    for item in found.failed:
        say(f"cairn: run {run}, steps {item.from_step} to {item.end.step}: {item.outcome}: {item.why}")
    print_document(found) if json else print_replay(found)
    return found.exit_code


def sweep(run: str, *, dry_run: Flag = False, store: Url = "", json: Json = False) -> None:
    """Apply retention and delete unneeded checkpoints; after a kill the same command goes on.

    Args:
        dry_run: list what would go and stay, and why; change nothing.

    Examples:
        cairn sweep quickstart --dry-run
        cairn sweep quickstart
    """
    from cairn.flows.operations.store_sweep import sweep_run_by_id

    report = sweep_run_by_id(open_chosen_store(store), run, dry_run=dry_run)
    if json:
        print_document(report)
        return
    rows = [(i.action, i.kind, i.step, i.attempt, f"{i.bytes:,}", i.why, i.key) for i in report.items]
    columns = ("action", "what", "step", "attempt", "bytes", "why", "where")
    print_table(columns, rows, empty="no checkpoints yet")
    counts = Counter[str](item.action for item in report.items)
    done = ", ".join(f"{_DONE[action]} {counts[action]}" for action in _DONE if counts[action])
    when = " (a sweep would do this; nothing was changed)" if report.dry_run else ""
    print_line(f"run {report.run_id}: {done or 'nothing to do'}; freed {report.freed_bytes:,} bytes{when}")


def note(run: str, *text: str, tag: Tags = (), untag: Tags = (), store: Url = "", json: Json = False) -> None:
    """Write a note on a run, tag it, or take tags away, while it trains too; alone it shows notes and tags.

    Notes and tags are entries of the run's log, with your name: nothing is erased, and a fork does not inherit them.

    Args:
        text: what you want to remember, at most 2,000 characters.
        tag: a name by which runs are found; may be repeated.
        untag: a tag to take away; may be repeated.

    Examples:
        cairn note quickstart 'the rate was too high' --tag baseline
        cairn note quickstart --untag baseline
    """
    from cairn.operations.run_notes import note_run
    from cairn.reports.text.display_tables import notes_table

    found = note_run(open_run_log(store, run), " ".join(text), tag, untag)
    facts = {"run": run, "tags": ", ".join(found.tags) or None}
    print_document(found) if json else print_blocks(facts, "", notes_table(found.notes))


def delete(
    run: str, *, yes: Flag = False, dry_run: Flag = False, why: Why = "", store: Url = "", json: Json = False
) -> None:
    """Delete a run's checkpoints for good; its log, receipts and curve stay (`cairn runs --archived`).

    Asks on a terminal. Exit 3 if an alias or a fork needs the run, exit 7 if an attempt of it is alive; after a kill
    the same command goes on. Its data stays too: other runs may be built on it.

    Args:
        yes: do not ask; needed where there is no terminal.
        dry_run: list what would go; change nothing.

    Examples:
        cairn delete quickstart --dry-run
        cairn delete quickstart --yes --why 'a first try'
    """
    from cairn.operations.person_decisions import delete_as_person, describe_deletion, preview_deletion

    found = open_run_log(store, run)
    view = preview_deletion(found)
    if not (dry_run or yes) and found.state.deleted is None:
        if not sys.stdin.isatty():
            raise InvalidConfiguration(f"delete {run}: there is no terminal to ask on; add --yes, or --dry-run")
        say("\n".join([*describe_deletion(view), f"type {run} to delete it:"]))
        if (answer := sys.stdin.readline().strip()) != run:
            raise InvalidConfiguration(f"{answer!r} is not {run!r}: nothing is deleted; the same command asks again")
    if not dry_run:
        view = delete_as_person(found, view, why)
    print_document(view) if json else print_line("\n".join(describe_deletion(view)))
