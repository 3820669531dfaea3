"""Wrong wires of storage: appends, retries, folders."""

from tests.wiring.mutant import mutant

ENTRY_LOG = "tests/storage/test_entry_log.py"
CHECKSUM = "tests/storage/test_entry_checksum.py"
HOLE = "tests/storage/test_log_hole.py"
CLOUDS = "tests/clouds/test_cloud_faults.py"
SWEEP = "storage/checkpoints/sweep.py"
OVERTAKEN = "tests/storage/test_sweep.py::test_a_superseding_that_lost_its_number_to_an_evaluation_is_decided_again"
FACTS = "tests/storage/test_manifest_facts.py"
FORK_PIN = "storage/checkpoints/resume_point.py"
FORK_TESTS = "tests/storage/test_fork_pin.py"

STORAGE_MUTANTS = (
    mutant(
        "refusal-retried",
        "storage/stores/object_store.py",
        "except (errors.StoreRefused, errors.NotDurable):",
        "except errors.NotDurable:",
        f"{ENTRY_LOG}::test_an_append_that_the_store_refuses_is_tried_once_however_long_the_run_waits",
    ),
    mutant(
        "cloud-without-the-condition-of-a-create",
        "storage/stores/cloud_store.py",
        'mode="create"',
        'mode="overwrite"',
        f"{CLOUDS}::test_a_server_behind_a_sound_network_is_accepted",
    ),
    mutant(
        "cloud-keeps-memory-that-is-used-again",
        "storage/stores/cloud_store.py",
        "yield bytes(piece)",
        "yield piece",
        f"{CLOUDS}::test_a_chunk_may_be_reused_once_the_next_one_is_asked_for",
    ),
    mutant(
        "cloud-takes-a-lost-upload-for-done",
        "storage/stores/cloud_store.py",
        "if self._token(name) != token:",
        "if False:",
        f"{CLOUDS}::test_a_stream_that_never_gets_through_is_an_error_and_no_object",
    ),
    mutant(
        "deletion-forgotten-by-the-index",
        "storage/logs/run_index.py",
        "        deleted=state.deleted,\n",
        "",
        "tests/storage/test_run_deletion.py::test_a_watchers_index_takes_it_for_deleted_at_once",
    ),
    mutant(
        "refused-append-unknown",
        "storage/logs/log_entry.py",
        "may_be_written |= not isinstance(error, errors.StoreRefused)",
        "may_be_written = True",
        f"{ENTRY_LOG}::test_an_append_that_the_store_refuses_is_tried_once_however_long_the_run_waits",
    ),
    mutant(
        "state-digest-not-recomputed",
        "storage/checkpoints/checkpoint.py",
        "if payload.state_sha256([*manifest.tensors, *trainer.tensors]) != manifest.state_sha256:",
        "if False:",
        f"{FACTS}::test_opening_recomputes_what_the_manifest_says_of_the_state",
    ),
    mutant(
        "manifest-of-another-run-believed",
        "storage/checkpoints/checkpoint.py",
        "        if found != said:\n",
        '        if found != said and field != "run":\n',
        f"{FACTS}::test_loading_refuses_what_verifying_refuses",
    ),
    mutant(
        "second-read-from-the-page-cache",
        "storage/checkpoints/checkpoint_shard.py",
        "                    forget_cached_bytes(path)\n",
        "                    pass\n",
        f"{FACTS}::test_a_second_read_of_a_damaged_object_does_not_come_from_the_page_cache",
    ),
    mutant(
        "second-look-from-the-page-cache",
        "storage/checkpoints/resume_point.py",
        "            local_store.forget_cached_bytes(path)\n",
        "            pass\n",
        "tests/storage/test_resume_point.py::test_a_second_look_does_not_come_from_memory",
    ),
    mutant(
        "log-not-read-after-a-failed-read",
        "storage/checkpoints/resume_point.py",
        "        suspects = tuple(item.key for item in damaged)\n        log.refresh()\n",
        "        suspects = tuple(item.key for item in damaged)\n",
        "tests/storage/test_resume_point.py::test_an_outage_that_ends_with_the_last_failed_read_condemns_nothing",
    ),
    mutant(
        "superseding-on-an-old-state",
        SWEEP,
        "self._append(partial(self._superseding, finding.key))",
        "self._append(lambda state, key=finding.key: self._superseding(key, self._state))",
        OVERTAKEN,
    ),
    mutant(
        "superseding-without-a-new-plan",
        SWEEP,
        "if record is None or finding is None or not finding.is_over or state.is_needed(prefix):",
        "if record is None or finding is None or state.is_needed(prefix):",
        OVERTAKEN,
    ),
    mutant(
        "checksum-not-compared",
        "storage/logs/log_entry.py",
        "elif entry.checksum != (found := _checksum_of(data)):",
        "elif (found := _checksum_of(data)) is None:",
        f"{CHECKSUM}::test_a_flipped_bit_in_the_newest_entry_is_refused_by_name_and_nothing_is_written",
    ),
    mutant(
        "checksum-undone-by-a-flip-in-its-name",
        "storage/logs/log_entry.py",
        "if unknown := sorted(",
        "if unknown := [] and sorted(",
        f"{CHECKSUM}::test_no_flipped_bit_of_an_entry_is_believed",
    ),
    mutant(
        "log-not-whole-before-the-first-append",
        "storage/logs/run_log.py",
        "state = self.refresh_whole()",
        "state = self.refresh()",
        f"{HOLE}::test_an_entry_that_is_missing_is_named_and_nothing_is_written",
    ),
    mutant(
        "registry-not-whole-before-the-first-append",
        "storage/logs/registry.py",
        "self.refresh_whole()",
        "self.refresh()",
        f"{HOLE}::test_a_missing_decision_of_a_registry_is_named_and_nothing_is_written",
    ),
    mutant(
        "newest-name-asked-for-after-reading",
        "storage/logs/fold_cache.py",
        "        newest = -1 if self._is_whole else self._log.newest_seq()  # first: then all before it is there\n"
        "        state = self.refresh()\n",
        "        state = self.refresh()\n        newest = -1 if self._is_whole else self._log.newest_seq()\n",
        f"{HOLE}::test_an_entry_that_is_appended_while_the_newest_name_is_asked_for_is_no_hole",
    ),
    mutant(
        "reserve-never-used",
        "storage/stores/local_store.py",
        "for is_full in (False, *[True] * local_disk.FILES):",
        "for is_full in (False,):",
        "tests/storage/test_full_store.py::test_an_entry_finds_the_room_that_was_set_aside",
    ),
    mutant(
        "orphans-deleted-after-entries",
        "storage/checkpoints/sweep.py",
        "        # What needs no entry goes first: in a full store it makes the room for entries.\n",
        "        self._supersede()\n",
        "tests/storage/test_full_store.py::test_without_anything_set_aside_a_sweep_first_deletes_what_needs_no_entry",
    ),
    mutant(
        "folder-fsync-forgiven",
        "storage/stores/local_store.py",
        "except (FileNotFoundError, PermissionError):\n            return",
        "except OSError:\n            return",
        "tests/storage/test_local_store_fsync.py::"
        "test_a_new_folder_whose_name_is_not_on_disk_is_made_anew_by_a_repetition",
    ),
    mutant(
        "folder-synced-by-its-maker-only",
        "storage/stores/local_store.py",
        "if folder.is_dir() and (folder in self._synced or not folder.is_relative_to(self._root)):",
        "if folder.is_dir():",
        "tests/protocol/test_power_cuts.py::"
        "test_a_folder_made_by_a_process_that_died_before_it_was_synced_is_synced_by_the_next_that_writes_there",
    ),
    mutant(
        "pin-of-a-fork-ends-with-its-maker",
        FORK_PIN,
        "    if state.opened is None:\n        return is_abandoned,",
        "    if state.opened is None or is_abandoned:\n        return is_abandoned,",
        f"{FORK_TESTS}::test_a_pin_outlives_the_process_that_forked",
    ),
    mutant(
        "fork-is-grown-once-it-is-claimed",
        FORK_PIN,
        "    if state.finished is not None or",
        "    if state.attempts or",
        f"{FORK_TESTS}::test_a_claim_alone_does_not_end_the_pin",
    ),
    mutant(
        "fork-is-grown-with-its-first-commit",
        FORK_PIN,
        "return own >= keep,",
        "return own >= 1,",
        f"{FORK_TESTS}::test_the_beginning_stays_until_the_fork_has_as_many_commits_as_it_keeps",
    ),
    mutant(
        "fork-opened-before-its-pin",
        FORK_PIN,
        "    if not pin_checkpoint(parent, pin, writer=writer):",
        "    RunLog(parent.store, body.run_id).append(partial(_unless_too_late, body, pin), writer=writer)\n"
        "    if not pin_checkpoint(parent, pin, writer=writer):",
        f"{FORK_TESTS}::test_a_fork_is_not_opened_unless_its_beginning_is_pinned",
    ),
    mutant(
        "loser-of-a-fork-keeps-its-pin",
        FORK_PIN,
        '        unpin_checkpoint(parent, pin, "another process opened the run first", writer=writer)',
        "        pass",
        f"{FORK_TESTS}::test_who_loses_the_race_for_a_fork_leaves_no_pin",
    ),
    mutant(
        "dead-fork-not-closed",
        FORK_PIN,
        "    if state.opened is not None or pin.pin_id in state.abandoned_pins:\n        return None",
        "    if True:\n        return None",
        f"{FORK_TESTS}::test_a_late_birth_after_a_sweep_opens_nothing",
    ),
    mutant(
        "starting-over-without-a-look",
        FORK_PIN,
        "verified_beginning(log, sleep=sleep), log.state.origin",
        "log.state.beginning, log.state.origin",
        f"{FORK_TESTS}::test_a_fork_whose_beginning_is_damaged_does_not_claim_it",
    ),
    mutant(
        "a-spool-goes-on",
        "storage/logs/step_log.py",
        '"w") if local is None',
        '"a") if local is None',
        "tests/storage/test_step_tail.py::test_a_spool_begins_empty",
    ),
    mutant(
        "step-records-of-any-claim",
        "storage/logs/step_log.py",
        'return f"attempt-{attempt:04d}-{claim_id}" if is_name else',
        "return",
        "tests/storage/test_step_tail.py::test_records_of_another_claim_of_this_attempt_are_not_read",
    ),
    mutant(
        "heartbeat-of-any-claim",
        "storage/logs/step_log.py",
        'return beat if claim_id in ("", beat.claim_id) else None',
        "return beat",
        "tests/storage/test_heartbeat.py::test_the_heartbeat_of_another_runs_attempt_of_this_number_counts_as_none",
    ),
)
