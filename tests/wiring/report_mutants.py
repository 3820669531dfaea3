"""Wrong wires between the log and what is told of it: receipts, SQL columns, promotions, retention."""

from tests.wiring.mutant import key, mutant

ROWS, RECEIPTS, ALIASES = (
    "reports/queries/run_tables.py",
    "reports/queries/receipts.py",
    "reports/queries/alias_history.py",
)
COMPARISON, COMPARISONS = "tasks/checkpoints/metric_comparison.py", "tests/tasks/test_metric_comparison.py"
COLUMNS = "tests/reports/test_sql_columns.py::test_every_column_that_follows_from_the_log_shows_its_own_field"
RECORDED = "tests/reports/test_sql_columns.py::test_a_recorded_evaluation_shows_its_metrics_samples_and_verdict"
DECISIONS = "tests/reports/test_sql_columns.py::test_every_decision_on_an_alias_shows_its_own_fields"

PAGE = "cairn/ui/person_requests.py"
STREAMED = (
    "tests/security/test_person_requests.py::"
    "test_a_text_is_streamed_that_the_command_would_draw_and_the_store_stays_as_it_was"
)

REPORT_MUTANTS = (
    mutant(
        "page-obeys-every-origin",
        "cairn/ui/local_server.py",
        'request.method not in ("GET", "HEAD") and',
        "False and",
        "tests/security/test_person_requests.py::test_a_page_of_another_origin_asks_for_nothing_even_with_the_cookie",
    ),
    mutant(
        "page-draws-another-step",
        PAGE,
        "sampler.load(find_in_run(log, order.step))",
        "sampler.load(find_in_run(log))",
        STREAMED,
    ),
    mutant("page-draws-with-another-seed", PAGE, "sampler.write(order.seed,", "sampler.write(0,", STREAMED),
    mutant("page-draws-at-another-temperature", PAGE, "temperature=order.temperature", "temperature=0.8", STREAMED),
    mutant(
        "page-gives-a-folder-the-credentials-of-buckets",
        PAGE,
        "else _VARIABLES",
        "else _BUCKET_VARIABLES",
        "tests/security/test_person_requests.py::"
        "test_the_child_of_a_folder_gets_no_credentials_and_that_of_a_bucket_those_of_buckets",
    ),
    mutant(
        "sql-time-to-go-is-that-of-all-steps",
        "reports/queries/views.sql",
        "(rows.total_steps - greatest(rows.step, live.step))",
        "rows.total_steps",
        "tests/cairn/test_sql_command.py::test_only_a_run_that_trains_has_a_speed_and_a_time_to_go",
    ),
    mutant(
        "sql-run-wastes-what-is-useful",
        ROWS,
        "sum(getattr(ended, name) for",
        'sum(getattr(ended, name.replace("wasted", "useful")) for',
        COLUMNS,
    ),
    mutant(
        "sql-delay-is-zero",
        RECEIPTS,
        "decision=ended.decision if ended",
        "decision=replace(ended.decision, delay_seconds=0.0) if ended",
        COLUMNS,
    ),
    mutant(
        "sql-attempt-useful-is-all",
        RECEIPTS,
        "useful_gpu_seconds=ended.useful_gpu_seconds",
        "useful_gpu_seconds=ended.gpu_seconds",
        COLUMNS,
    ),
    mutant(
        "sql-attempt-ends-when-it-starts", RECEIPTS, "ended_at=record.ended_at", "ended_at=record.started_at", COLUMNS
    ),
    mutant(
        "sql-attempt-reached-what-it-committed",
        RECEIPTS,
        "last_step=max(record.last_known_step,",
        "last_step=max(record.last_committed_step or 0,",
        COLUMNS,
    ),
    mutant(
        "sql-processes-are-threads",
        RECEIPTS,
        "placement=started.placement,",
        "placement=replace(started.placement, world_size=started.placement.threads),",
        COLUMNS,
    ),
    mutant("sql-progress-is-constant", ROWS, "made_progress=record.made_progress", "made_progress=False", COLUMNS),
    mutant(
        "sql-checkpoint-time-is-the-runs",
        ROWS,
        "gpu_seconds=record.committed.gpu_seconds",
        "gpu_seconds=float(record.committed.tokens)",
        COLUMNS,
    ),
    mutant(
        "sql-run-finished-when-opened",
        ROWS,
        "finished_at=committed_at.get(finished.manifest_sha256) if finished else None",
        "finished_at=state.opened_at if finished else None",
        COLUMNS,
    ),
    mutant(
        "sql-heads-are-layers",
        ROWS,
        "stored_value(config, section, name, kind) for",
        'stored_value(config, section, "n_layer" if name == "n_head" else name, kind) for',
        COLUMNS,
    ),
    mutant(
        "sql-quarantine-counts-entries",
        ROWS,
        "quarantined_windows=len(state.quarantined_windows)",
        "quarantined_windows=len(state.quarantines)",
        COLUMNS,
    ),
    mutant(
        "sql-perplexity-is-the-loss",
        ROWS,
        "summary.metrics.get(name) for",
        'summary.metrics.get(name.replace("perplexity", "val_loss")) for',
        RECORDED,
    ),
    mutant(
        "sql-refused-is-current",
        ALIASES,
        "if isinstance(body, Promoted | RolledBack)]",
        "if body is not None]",
        DECISIONS,
    ),
    mutant("sql-back-from-nowhere", ALIASES, "previous = body.left_manifest_sha256", "previous = None", DECISIONS),
    mutant(
        "promotion-without-improvement",
        COMPARISON,
        "difference.better_by - gate.margin < noise",
        "difference.better_by < noise",
        "tests/tasks/test_promotion.py::test_the_loss_must_be_below_the_champions_by_the_improvement_asked_for",
    ),
    mutant(
        "promotion-within-the-noise",
        COMPARISON,
        "difference.better_by - gate.margin < noise",
        "difference.better_by < gate.margin",
        f"{COMPARISONS}::test_an_improvement_within_the_noise_of_the_windows_is_refused",
    ),
    mutant(
        "promotion-error-of-single-windows",
        COMPARISON,
        "blocks = min(BLOCKS, len(differences))",
        "blocks = len(differences)",
        f"{COMPARISONS}::test_neighbouring_windows_that_are_alike_count_as_few",
    ),
    mutant(
        "promotion-across-windows",
        COMPARISON,
        "if windows[0] != windows[1]:",
        "if windows[0][1] != windows[1][1]:",
        f"{COMPARISONS}::test_two_samples_of_different_text_are_never_compared",
    ),
    mutant(
        "promotion-gates-unread",
        "flows/operations/checkpoint_operations.py",
        "gates=config.promotion.gates,",
        "",
        key("further_comparisons_with_the_champion"),
    ),
    mutant(
        "retention-keeps-one-less",
        "tasks/checkpoints/retention.py",
        "readable[: terms.policy.keep_last]",
        "readable[: terms.policy.keep_last - 1]",
        "tests/tasks/test_retention.py::test_the_newest_are_kept_and_the_others_go",
    ),
    mutant(
        "sweep-of-the-default-policy",
        "flows/operations/store_sweep.py",
        "sweep_run(log, configuration.checkpoint,",
        "sweep_run(log, type(configuration.checkpoint)(),",
        "tests/flows/test_store_sweep.py::test_every_run_is_swept_by_its_own_policy",
    ),
)
