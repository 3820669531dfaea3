"""The Python API: `cairn.open` reads a store, `cairn.train` runs the command `cairn train`.

Tables are `pyarrow.Table`, and `.to_pandas()` makes a DataFrame where pandas is installed. Nothing heavy is imported
before it is needed: tables need no torch, and no part of this module imports Prefect. A notebook shows stores, runs,
tables and pictures by IPython's display protocol.
"""

import html
import json
import os
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.reports.queries import run_comparison, run_lookup, run_query, run_status, run_tables
from cairn.reports.text import answer_text, display_tables
from cairn.storage.logs import run_log, step_log
from cairn.storage.stores import child_process, object_store, open_store
from cairn.storage.tables import table_cache
from cairn.tasks.configuration.addresses import choose_store
from cairn.tasks.machine.placement import work_folder

if TYPE_CHECKING:
    import pyarrow as pa

    from cairn.model.architectures.own_network import Network
    from cairn.tasks.evaluator.checkpoint_model import CheckpointModel

_LINE_CHARACTERS, _MOST_ROWS = 110, 60


class TrainingStopped(Exception):
    """`cairn train` ended before the run was finished; `exit_code` is the command's, the message its last lines."""

    def __init__(self, exit_code: int, said: str) -> None:
        super().__init__(said or f"cairn train exited with {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot: the bytes of a PNG."""

    png: bytes = field(repr=False)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the file; one that exists is replaced."""
        from cairn.reports.plots.run_curves import write_output

        write_output(Path(file), self.png)

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other, as in `cairn compare`: settings that differ, losses, metrics and cost."""

    view: run_comparison.RunComparison
    logs: list[run_log.RunLog] = field(repr=False)

    def plot(self, *, x: str = "step") -> Picture:
        """Return the runs' losses over each other, by `step`, `tokens` or `time` of training."""
        from cairn.reports.plots.curve_plot import draw_comparison

        return Picture(draw_comparison(self.logs, across=x))

    def _repr_html_(self) -> str:
        tables = display_tables.compared_runs_table(self.view), display_tables.held_out_table(self.view)
        picture = f'<img alt="losses" width="800" src="data:image/png;base64,{b64encode(self.plot().png).decode()}">'
        return "".join((*map(_html_of, tables), picture))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a store; every property reads the log again and has the columns of the SQL table it names."""

    log: run_log.RunLog

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.log.run_id

    @property
    def status(self) -> run_status.RunStatus:
        """State, step, owner, budgets left and next action, as in `cairn status`."""
        self.log.refresh()
        return run_status.read_status(self.log)

    @property
    def attempts(self) -> "pa.Table":
        """The receipt of every attempt (`training_attempts`)."""
        return self._table("training_attempts")

    @property
    def checkpoints(self) -> "pa.Table":
        """Every committed checkpoint with its present state (`checkpoints`)."""
        return self._table("checkpoints")

    @property
    def evaluations(self) -> "pa.Table":
        """Every evaluation, recorded or failed (`evaluations`)."""
        return self._table("evaluations")

    @property
    def curve(self) -> "pa.Table":
        """Every surviving step once, in order: loss, learning rate, gradient norm, speed (`steps`)."""
        return self._table("steps")

    def load_model(self, step: int | None = None, *, device: str = "cpu") -> "Network":
        """Return the network of the newest committed checkpoint, or of `step`, in evaluation mode.

        Every byte is verified: raises `IntegrityError` if one differs from what was committed.
        """
        return self.open_checkpoint(step, device=device).network

    def open_checkpoint(self, step: int | None = None, *, device: str = "cpu") -> "CheckpointModel":
        """Return the same network with its tokenizer and data snapshot."""
        from cairn.operations.trained_models import open_run_model

        return open_run_model(self.log, run_lookup.find_in_run(self.log, step), device)

    def plot(self, *, x: str = "step") -> Picture:
        """Return the picture of `cairn plot`; the axis at the bottom counts `step` or `tokens`."""
        from cairn.reports.plots import curve_plot, run_curves

        self.log.refresh()
        return Picture(curve_plot.draw_run(run_curves.gather_curves(self.log), across=x))

    def sample(
        self, prompt: str = "", *, step: int | None = None, tokens: int = 200, temperature: float = 0.8, seed: int = 0
    ) -> str:
        """Return the prompt and at most `tokens` after it, by the newest committed checkpoint or that of `step`."""
        from cairn.operations.trained_models import RunSampler, SampleRequest

        sampler = RunSampler(self.log, SampleRequest(prompt=prompt, tokens=tokens, temperature=temperature))
        sampler.load(run_lookup.find_in_run(self.log, step))
        return prompt + sampler.write(seed, lambda piece: None).text

    def _repr_html_(self) -> str:
        first, *others = answer_text.status_facts(self.status).items()
        return _html_table(first, others)

    def _table(self, name: str) -> "pa.Table":
        state = self.log.refresh()
        if name == "steps":
            records = step_log.read_step_records(self.log.store, self.log.prefix, state.attempts)
            rows = run_tables.make_step_rows(self.run_id, state, records)
        else:
            rows = run_tables.make_log_rows(self.run_id, state, run_status.phase_of(state))[name]
        return table_cache.arrow_table(run_tables.columns(name), rows)


@dataclass(frozen=True, slots=True)
class Store:
    """A store of runs."""

    objects: object_store.ObjectStore

    @property
    def runs(self) -> "pa.Table":
        """One row a run, sorted by name (`runs`)."""
        return self.sql("select * from runs order by run_id")

    def run(self, run_id: str) -> Run:
        """Return a run; raises `RunNotFound`, which lists the runs there are."""
        return Run(run_lookup.find_run(self.objects, run_id))

    def sql(self, query: str) -> "pa.Table":
        """Return the answer of `cairn sql`; raises `InvalidQuery` with the database's message."""
        import pyarrow as pa

        with run_query.answer_query(self.objects, query, work=work_folder(os.environ)) as found:
            rows = list(found.rows)
        names = [column.name for column in found.columns]
        arrays = [pa.array([row[place] for row in rows]) for place in range(len(names))]
        return pa.Table.from_arrays(arrays, names=names)

    def compare(self, *names: str) -> Comparison:
        """Return two runs or more, or a set of runs, beside each other; raises `RunNotFound`."""
        logs = run_comparison.find_runs(self.objects, names)
        return Comparison(run_comparison.compare_runs(logs), logs)

    def _repr_html_(self) -> str:
        rows = [row for row in run_status.list_runs(self.objects) if row.state != run_status.RunPhase.DELETED]
        return _html_of(display_tables.runs_table(rows, empty=f"no run in {self.objects.url}"))

    def load_model(self, reference: str, *, device: str = "cpu") -> "Network":
        """Return the network of an alias such as `champion`, of RUN or RUN@STEP, in evaluation mode."""
        from cairn.operations.trained_models import open_run_model

        found = run_lookup.find_checkpoint(self.objects, reference)
        return open_run_model(found.log, found.reference, device).network


def open(store: str | os.PathLike[str] = "") -> Store:
    """Return the store at a folder or URL; by default CAIRN_STORE, else ./cairn-store. Nothing is read yet."""
    if shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)():
        shell.display_formatter.formatters["text/html"].for_type_by_name("pyarrow.lib", "Table", _html_of_arrow)
    return Store(open_store.open_store(choose_store(os.fspath(store), os.environ)))


def train(
    config: str | os.PathLike[str] = "",
    *,
    run_id: str = "",
    settings: Mapping[str, object] | None = None,
    store: str | os.PathLike[str] = "",
) -> Run:
    """Train a run to its end, or continue it, and return it; `settings` are those of `--set`, by key.

    The command runs in a process of its own and its progress is printed on stderr, in a notebook in the cell; there and
    on a terminal the line of a step takes the place of the one before. Raises `InvalidConfiguration` for a
    configuration that cannot be read and `TrainingStopped` if the run is not finished: the same call continues it.
    """
    from cairn.flows.preparation.training_request import TrainingRequest, resolve_request

    overrides = tuple(
        f"{key}={os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value)}"
        for key, value in (settings or {}).items()
    )
    path = os.fspath(config)
    request = TrainingRequest(config=path, run_id=run_id, overrides=overrides, store=os.fspath(store))
    resolved = resolve_request(request, os.environ)
    settings_given = (f"--set={one}" for one in overrides)
    given = (*filter(None, [path]), f"--run-id={resolved.run_id}", f"--store={resolved.store_url}", *settings_given)
    command, said = child_process.child_command("cairn.cli.command", "train", *given), deque[str](maxlen=20)
    screen = sys.stdout if (is_cell := "ipykernel" in sys.modules) else sys.stderr  # a cell's stderr is red
    is_rewritten = is_cell or screen.isatty()
    with child_process.start_child(command, stdin=None, stdout=child_process.DEVNULL, own_group=False) as child:
        assert child.stderr is not None
        while child.poll() is None:
            with suppress(KeyboardInterrupt):  # the command gets it itself
                for line in child.stderr:
                    said.append(line.decode(errors="replace"))
                    end = "" if said[-1].startswith("step ") else "\n"
                    screen.write(f"\r{said[-1].rstrip():{_LINE_CHARACTERS}}{end}" if is_rewritten else said[-1])
                    screen.flush()
                child.wait()
    if child.returncode:
        raise TrainingStopped(child.returncode, "".join(said).rstrip())
    return open(resolved.store_url).run(resolved.run_id)


def _html_of(table: display_tables.Table) -> str:
    return _html_table(table.columns, table.rows) if table.rows else f"<p>{html.escape(table.empty)}</p>"


def _html_of_arrow(table: "pa.Table") -> str:
    rows = zip(*(column.to_pylist() for column in table.slice(0, _MOST_ROWS).columns), strict=True)
    more = f"<p>{_MOST_ROWS} of {table.num_rows:,} rows</p>" if table.num_rows > _MOST_ROWS else ""
    return _html_table(table.column_names, rows) + more


def _html_table(columns: Iterable[object], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in which no text of a run is a tag."""

    def line(tag: str, cells: Iterable[object]) -> str:
        texts = (html.escape(display_tables.format_cell(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    return f"<table>{line('th', columns)}{''.join(line('td', row) for row in rows)}</table>"
