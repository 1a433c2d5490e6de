"""The changes of `make mutants`: for each guarantee a small change of one file, and the test that must notice it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "reinforge"


class Mutant(NamedTuple):
    """A change below `src/reinforge`: `old`, which is there once, becomes `new`; `select` is pytest's `-k`.

    One that `is_slow` needs a test that only the long suites run.
    """

    guarantee: str
    file: str
    old: str
    new: str
    test: str
    select: str = ""
    is_slow: bool = False


MUTANTS = [
    Mutant(
        "Resuming loses nothing",
        "engine/engine.py",
        "        checkpoint.restore_rng(state)\n",
        "",
        "tests/fault/test_kill_anywhere.py::test_a_run_killed_at_crash_points_ends_as_if_undisturbed",
        "after_tensor",
    ),
    Mutant(
        "Resuming loses nothing: LoRA, SFT, DPO, PPO",
        "engine/engine.py",
        "            checkpoint.load_critic(folder, self.critic)\n",
        "            self.critic.reset()\n",
        "tests/fault/test_kill_methods.py::test_a_run_killed_at_crash_points_ends_as_if_undisturbed",
        "ppo",
        is_slow=True,
    ),
    Mutant(
        "Resuming loses nothing: pipelines",
        "engine/engine.py",
        "        self._stages.restore(state.stage, learner, state.stage_version, self.config)\n",
        "",
        "tests/fault/test_pipeline.py::test_a_kill_at_the_border_of_two_stages",
    ),
    Mutant(
        "Damaged checkpoints are not loaded",
        "files.py",
        'hashlib.file_digest(file, "sha256").hexdigest()',
        "hashlib.sha256(file.read(2**20)).hexdigest()",
        "tests/fault/test_checkpoints_damaged.py",
        "far_into",
    ),
    Mutant(
        "The journal keeps what it acknowledged",
        "runs/journal/writer.py",
        "                waiting.append(entry)\n",
        "                entry.set()\n",
        "tests/fault/test_journal.py::test_a_writer_killed_at_any_time_leaves_everything_that_it_acknowledged",
    ),
    Mutant(
        "Feedback survives a kill",
        "learning/store.py",
        "        self._writer.put(carry)\n        self._writer.flush()\n",
        "        self._writer.put(carry)\n",
        "tests/fault/test_learning_server.py::test_feedback_survives_a_kill_around_its_commit",
    ),
    Mutant(
        "A decision by feedback survives a kill",
        "learning/api.py",
        "        await self._rate_all()\n        self._tasks",
        "        self._tasks",
        "tests/learning/test_live_comparison.py",
        "restart",
    ),
    Mutant(
        "Held-out users stay held out",
        "learning/training.py",
        '{"fixed": "true", ',
        '{"fixed": "false", ',
        "tests/learning/test_training.py",
        "held_out_users",
    ),
    Mutant(
        "What is pinned does not get worse",
        "trainer/gate.py",
        "        if summary.promoted and self._gate.regression is not None:\n",
        "        if summary.promoted is None and self._gate.regression is not None:\n",
        "tests/core/trainer/test_regression_set.py",
        "forgot",
    ),
    Mutant(
        "A training survives a kill of its server",
        "learning/training.py",
        "    except filelock.Timeout:\n        return True\n",
        "    except filelock.Timeout:\n        return False\n",
        "tests/learning/test_training.py",
        "by_a_request",
    ),
    Mutant(
        "A damaged journal is noticed and rebuilt",
        "runs/journal/schema.py",
        'checksum = zlib.crc32(body, zlib.crc32(b"%s %d:" % (head, len(body)), checksum))',
        'checksum = zlib.crc32(body[:100], zlib.crc32(b"%s %d:" % (head, len(body)), checksum))',
        "tests/fault/test_journal_damaged.py::test_no_changed_bit_of_a_journal_is_overlooked",
    ),
    Mutant(
        "Strings that cannot be written",
        "files.py",
        "    except BaseException as cause:\n        if is_interrupt(cause):\n            raise\n        raise Rec",
        "    except (TypeError, ValueError, RecursionError) as cause:\n        raise Rec",
        "tests/fault/test_unrecordable.py",
    ),
    Mutant(
        "Strings that cannot be written",
        "rollout/ending.py",
        "find_unwritable(record.item.output_obj, max_chars=get_limits().output_chars)",
        "find_unwritable(record.item.output_obj)",
        "tests/fault/test_unrecordable.py::test_an_output_that_cannot_be_written_costs_its_episodes",
        "characters",
    ),
    Mutant(
        "A journal of another format is refused",
        "runs/journal/schema.py",
        "    elif found != SCHEMA_VERSION:\n",
        "    elif found > SCHEMA_VERSION:\n",
        "tests/core/runs/test_journal_schema.py",
    ),
    Mutant(
        "A GGUF file is converted completely, and once",
        "exports/gguf/source.py",
        '    with FileLock(folder.parent / ".lock"):\n        if folder.is_dir():\n',
        '    with FileLock(folder.parent / ".lock"):\n        if folder.is_file():\n',
        "tests/exports/test_gguf_models.py::test_one_of_several_processes_converts_and_the_others_wait",
    ),
    Mutant(
        "Exports are whole",
        "exports/staging.py",
        "        check_target(target)  # something may have been put there in the meantime\n",
        "",
        "tests/exports/test_staging.py::test_files_that_came_in_the_meantime_are_kept",
    ),
    Mutant(
        "A wrong export is noticed",
        "exports/gguf/file.py",
        "            tensor = permute_heads(tensor, heads[last])\n",
        "            permute_heads(tensor, heads[last])\n",
        "tests/exports/test_gguf.py::test_a_file_has_the_log_probs_of_its_model",
    ),
    Mutant(
        "Partial lines are repaired",
        "files.py",
        "            return start + int(line_break) + 1\n",
        "            return start + int(line_break)\n",
        "tests/fault/test_torn_lines.py::test_a_file_cut_at_any_byte_keeps_its_complete_rows_and_takes_new_ones",
    ),
    Mutant(
        "Full or broken disks",
        "files.py",
        "                os.rename(replaced, target)\n",
        "                pass\n",
        "tests/fault/test_disk.py::test_a_commit_that_fails_at_any_call_leaves_the_previous_checkpoint",
    ),
    Mutant(
        "Full or broken disks",
        "trainer/setup/prepare.py",
        "        attempt.add(find_disk_problems(builder.loaded, measure_disk(builder.loaded)))\n",
        "        pass\n",
        "tests/core/e2e/test_finetune_function.py::test_a_disk_that_is_too_small_is_found_before_the_run",
    ),
    Mutant(
        "One process per run folder",
        "runs/journal/journal.py",
        '        raise StorageError(f"the run folder {folder} is in use by {describe_owner(folder)}") from None\n',
        "        pass\n",
        "tests/fault/test_lock.py::test_one_of_four_gets_the_folder_and_after_its_death_another",
    ),
    Mutant(
        "One job per epoch at a fine-tuning service",
        "protocols/openai/service.py",
        "                if not job.ended_without_model:\n",
        "                if job.is_done:\n",
        "tests/fault/test_remote_jobs.py::test_a_run_killed_before_the_response_has_one_job",
    ),
    Mutant(
        "One job per epoch at ART and NeMo Customizer",
        "protocols/art/client.py",
        "        if was_interrupted and (",
        "        if False and (",
        "tests/fault/test_art_jobs.py::test_a_run_killed_while_it_trains_finds_its_job[1]",
    ),
    Mutant(
        "One job per request of the fine-tuning API",
        "protocols/openai/server/api.py",
        "        is_retry = count_retries(request) > 0\n",
        "        is_retry = count_retries(request) > 1\n",
        "tests/protocols/test_fine_tuning_api.py",
    ),
    Mutant(
        "A fine-tuning job ends once",
        "protocols/openai/server/records.py",
        "    JobState.FAILED: frozenset(),\n",
        "    JobState.FAILED: frozenset({JobState.CANCELLED}),\n",
        "tests/protocols/test_fine_tuning_store.py",
    ),
    Mutant(
        "One job per key at a reinforge server",
        "protocols/sessions/server/session.py",
        "        key = collection.resolve_job_key()\n",
        '        key = f"{collection.resolve_job_key()}-{len(self._jobs)}"\n',
        "tests/protocols/test_http_adapter.py::test_a_lost_response_makes_no_second_job",
    ),
    Mutant(
        "One job per key at a reinforge server",
        "protocols/sessions/server/session.py",
        "        if key not in self._jobs:\n",
        "        if True:\n",
        "tests/protocols/test_http_adapter.py::test_a_job_that_is_sent_again_is_not_one_too_many",
    ),
    Mutant(
        "Gradients of Tinker's clients are whole",
        "protocols/tinker/server/training.py",
        "                await self._slots.clear_gradients(model.slot)\n",
        "",
        "tests/protocols/test_tinker.py::test_bad_data_is_refused_by_name_and_no_step_is_made",
        "loss",
    ),
    Mutant(
        "Unexpected answers of a service",
        "protocols/service.py",
        "            if last in seen or len(seen) >= most:\n",
        "            if len(seen) >= most:\n",
        "tests/protocols/test_openai_answers.py::test_a_list_ends_where_a_page_repeats",
    ),
    Mutant(
        "One job per step of a shared-model group",
        "multiagent/nip/adapter_group.py",
        "settings = (method, self.model_name, self.num_epochs, ",
        "settings = (method, self.model_name, ",
        "tests/nip/test_shared_model_groups.py::test_changed_parameters_of_the_experiment_make_another_job[embedded]",
    ),
    Mutant(
        "Guards warn in time",
        "trainer/guards.py",
        "count > 0 and count % limits.halt_after == 0",
        "count > 0 and count % (limits.halt_after + 1) == 0",
        "tests/core/trainer/test_guards.py::test_each_guard_warns_and_halts_at_the_right_epoch",
    ),
    Mutant(
        "A policy cannot hide a bad answer",
        "rollout/ending.py",
        "(Outcome.TOOL_ERROR if capture.bad_call is None else Outcome.POLICY_ERROR)",
        "Outcome.TOOL_ERROR",
        "tests/core/rollout/test_bad_calls.py::test_an_agent_that_fails_on_a_bad_call_of_the_policy_is_the_policys_failure",
    ),
    Mutant(
        "One request, one trained call",
        "rollout/http/gateway_access.py",
        "if each.digest == digest and not each.key and not each.has_failed]",
        "if each.digest == digest and not each.key and each.is_delivered]",
        "tests/core/rollout/test_gateway_retries.py::test_the_reply_that_reached_no_client_is_what_a_retry_gets",
    ),
    Mutant(
        "No one else can reach the models",
        "rollout/http/gateway_access.py",
        "        return hmac.compare_digest(encode_any(key), self.api_key.encode())\n",
        "        return hmac.compare_digest(encode_any(key)[:8], self.api_key.encode()[:8])\n",
        "tests/core/rollout/test_gateway_bad_input.py::test_the_key_of_one_episode_opens_no_other",
    ),
    Mutant(
        "No one else can reach `reinforge serve`",
        "serving/access.py",
        'OPEN_PATHS = frozenset({"/healthz"})',
        'OPEN_PATHS = frozenset({"/healthz", "/v1/models"})',
        "tests/serving/test_guard.py::test_every_route_but_healthz_needs_the_key",
    ),
    Mutant(
        "Trained tokens are the sampled tokens",
        "algorithms/samples.py",
        "        return len(prompt) >= length and list(prompt[:length]) == self.token_ids\n",
        "        return len(prompt) >= length and list(prompt[: length - 1]) == self.token_ids[:-1]\n",
        "tests/fault/test_token_fidelity.py::test_the_trained_tokens_are_the_sampled_tokens",
        "40",
    ),
    Mutant(
        "No token is too old",
        "trainer/epoch_collection.py",
        "policy_version < oldest\n",
        "policy_version < oldest - 1\n",
        "tests/fault/test_staleness.py::test_a_version_at_the_bound_is_not_too_old",
    ),
    Mutant(
        "Only a run's own files",
        "runs/removal.py",
        "    if folder.is_symlink():\n",
        "    if False:\n",
        "tests/core/runs/test_run_folder.py::test_rm_does_not_follow_links",
    ),
    Mutant(
        "Changed files of a run are noticed",
        "runs/manifest.py",
        "        if is_own and name not in known and not has_log:\n",
        '        if is_own and name not in known and not has_log and path.suffix != ".html":\n',
        "tests/core/e2e/test_runs.py::test_a_report_that_is_written_again_is_listed_again",
    ),
    Mutant(
        "One step per job of ART's clients",
        "protocols/art/server/records.py",
        '.get("job") == job:\n',
        '.get("job") is job:\n',
        "tests/fault/test_art_server.py::test_a_server_that_dies_at_one_point_makes_the_step_once",
    ),
    Mutant(
        "A failed poll is not a failed job",
        "protocols/jobs.py",
        "            if state.num_errors == WARN_AFTER:\n",
        "            if state.num_errors == WARN_AFTER + 1:\n",
        "tests/fault/test_remote_jobs.py::test_failed_polls_do_not_fail_the_job",
    ),
    Mutant(
        "Trackers neither stop a run nor repeat a point",
        "runs/tracking.py",
        "if point.step > self._known.get(name, -1)}",
        "if point.step >= self._known.get(name, -1)}",
        "tests/trackers/test_trackers.py::test_a_killed_and_resumed_run_sends_no_point_twice_where_the_run_keeps_the_record",
    ),
    Mutant(
        "Agents cannot kill the run",
        "rollout/isolation/containment.py",
        "        except BaseException as error:  # noqa: BLE001  such as SystemExit in a callback",
        "        except Exception as error:  # noqa: BLE001  such as SystemExit in a callback",
        "tests/fault/test_hostile_agents.py::test_an_attack_costs_its_own_episode_and_the_run_ends_with_nothing_left_behind",
        "callback",
        is_slow=True,
    ),
    Mutant(
        "Isolated agents and evaluators",
        "rollout/isolation/processes.py",
        "    _kill(descendants)\n\n\ndef kill_members",
        "\n\ndef kill_members",
        "tests/core/rollout/test_isolation.py::test_a_process_that_hangs_is_killed_with_everything_that_it_has_started",
    ),
    Mutant(
        "Agents in shared processes",
        "rollout/isolation/isolated_agent.py",
        "        if num_ends >= MAX_SHARED_ENDS:\n",
        "        if num_ends > MAX_SHARED_ENDS:\n",
        "tests/core/rollout/test_placement.py::test_an_agent_that_ends_its_process_costs_its_own_episode_alone",
    ),
    Mutant(
        "Limits of time and tokens",
        "trainer/context.py",
        'return self.tokens["completion"] + self._num_early_tokens - self._tokens_before',
        'return self.tokens["completion"] + self._num_early_tokens',
        "tests/fault/test_limits.py::test_each_call_gets_further_with_the_same_limit_and_repeats_no_finished_episode",
    ),
    Mutant(
        "Output that cannot be written",
        "cli/process.py",
        "    for number in (0, OUTPUT, ERRORS):\n",
        "    for number in (0, OUTPUT):\n",
        "tests/core/e2e/test_output.py::test_no_file_gets_the_number_of_a_closed_stream",
    ),
    Mutant(
        "Failing episodes stop the run",
        "rollout/runner.py",
        "        return attempt.number < self.runner.outcomes.retries\n",
        "        return attempt.number <= self.runner.outcomes.retries\n",
        "tests/fault/test_budgets.py::test_a_run_whose_every_episode_fails_ends_before_training",
    ),
    Mutant(
        "Tool calls and reasoning are trained as they were sampled",
        "rollout/history.py",
        "    if not same_form or not begins_with(request.messages, earlier.messages):\n",
        "    if not same_form or count > 2 or not begins_with(request.messages, earlier.messages):\n",
        "tests/fault/test_tool_dialogues.py::test_a_spliced_history_continues_the_sampled_tokens",
    ),
    Mutant(
        "An agent's own client changes no token",
        "rollout/http/exchange.py",
        "{**response.headers, **NO_RETRY}",
        "response.headers",
        "tests/core/rollout/test_clients.py::test_a_failed_call_has_openais_error_and_the_outcome_that_the_handles_error_has",
    ),
    Mutant(
        "Disconnected clients cost nothing more",
        "serving/routes.py",
        "    setattr(handler, _ABORTABLE, True)\n",
        "",
        "tests/serving/test_hanging_up.py::test_sampling_stops",
    ),
    Mutant(
        "Programs leave nothing behind",
        "rollout/workflows/command_workflow.py",
        'if name in INHERITED or name.startswith("LC_")}',
        'if name in INHERITED or not name.startswith("OPENAI_")}',
        "tests/core/rollout/test_command.py::test_the_environment_is_clean_but_for_what_is_named",
    ),
    Mutant(
        "A grammar costs only its own reply",
        "engine/sampling/constraints.py",
        "        if self._spent_s > GRACE_S + SECONDS_PER_TOKEN * self._num_tokens:\n",
        "        if self._spent_s > 60 + GRACE_S + SECONDS_PER_TOKEN * self._num_tokens:\n",
        "tests/core/engine/test_grammar.py::test_a_grammar_that_takes_too_long_fails_alone",
    ),
    Mutant(
        "States stay with their reply",
        "engine/model/architecture.py",
        "    if kind in UNCACHED_FAMILIES:\n",
        "    if kind is UNCACHED_FAMILIES:\n",
        "tests/core/numerics/test_architectures.py::test_a_model_that_keeps_states_in_its_modules_is_refused",
    ),
    Mutant(
        "Sampler and learner agree",
        "trainer/versions.py",
        "num_beyond = np.count_nonzero(~(distances_N <= tolerance))",
        "num_beyond = np.count_nonzero(~(distances_N <= 10_000 * tolerance))",
        "tests/fault/test_agreement.py::test_an_offset_stops_the_run_in_one_step[0.005]",
    ),
    Mutant(
        "vLLM samples from the new weights",
        "scale/vllm/sampler.py",
        "    largest = await _measure(policy, prompts)\n",
        "    largest = await _measure(policy, prompts, reads_prefix_cache=False)\n",
        "tests/scale/test_vllm_runs.py::test_a_prefix_cache_that_keeps_older_keys_is_found",
    ),
    Mutant(
        "A launched vLLM exits with the run",
        "scale/vllm/plugin/supervise.py",
        "    kill_group(program.pid)\n    if run_has_ended",
        "    if run_has_ended",
        "tests/scale/test_vllm_launch.py::test_a_server_that_dies_takes_its_processes_along_and_is_an_error",
        is_slow=True,
    ),
    Mutant(
        "Several processes make the steps of one",
        "engine/training/learner.py",
        "                    self.sum_gradients(self.peers.add, only_critic=self.sharded is not None)\n",
        "                    pass\n",
        "tests/core/engine/test_data_parallel.py::test_two_engines_make_the_steps_of_one",
    ),
    Mutant(
        "Non-finite numbers change nothing",
        "engine/training/scheduled_optimizer.py",
        "        if not torch.isfinite(norm) or not torch.isfinite(critic_norm):\n",
        "        if torch.isnan(norm) or torch.isnan(critic_norm):\n",
        "tests/fault/test_not_finite.py::test_a_step_with_a_non_finite_number_changes_no_bit",
        "norm",
    ),
    Mutant(
        "Out of memory",
        "engine/training/learner.py",
        "            except (MemoryError, RuntimeError) as cause:\n",
        "            except RuntimeError as cause:\n",
        "tests/fault/test_memory.py::test_a_run_with_too_little_memory_makes_the_same_step_in_smaller_micro_batches",
    ),
    Mutant(
        "Out of memory",
        "engine/training/learner.py",
        "                self.clear_gradients()\n                is_over",
        "                is_over",
        "tests/core/numerics/test_learner.py::test_running_out_of_memory_halves_micro_batches_and_changes_no_gradient",
    ),
    Mutant(
        "Batching does not change the gradient",
        "engine/training/kl_baseline.py",
        "float(np.maximum(total / weights, 0.0))",
        "float(total / weights)",
        "tests/core/numerics/test_kto.py",
    ),
    Mutant(
        "Failing evaluators",
        "evaluation/run.py",
        "        penalty = getattr(self.outcomes, record.outcome.value)\n",
        "        penalty = None\n",
        "tests/fault/test_evaluators.py",
    ),
    Mutant(
        "Failing evaluators",
        "evaluation/run.py",
        "Outcome.REWARD_ERROR if is_function else Outcome.JUDGE_ERROR",
        "Outcome.JUDGE_ERROR",
        "tests/fault/test_evaluators.py",
    ),
    Mutant(
        "Failing evaluators",
        "evaluation/evaluators/base.py",
        "        return missing_score(item, str(error))\n",
        "        return EvalOutputItem(id=item.id, score=0.0, reasoning=str(error))\n",
        "tests/fault/test_evaluators.py",
    ),
    Mutant(
        "A group is compared as a whole or not at all",
        "evaluation/opponents.py",
        "        if len(self._records[group]) < self._sizes[group]:\n",
        "        if len(self._records[group]) < self._sizes[group] - 1:\n",
        "tests/core/evaluation/test_opponents.py",
    ),
    Mutant(
        "A broken installation is found",
        "tasks/self_test/learning.py",
        "    _require_learning(summary)\n",
        "",
        "tests/tasks/test_self_test.py",
    ),
    Mutant(
        "Signals",
        "trainer/shutdown.py",
        '("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")',
        '("SIGINT", "SIGTERM", "SIGUSR1")',
        "tests/fault/test_signals.py::test_further_signals_write_a_checkpoint_too",
    ),
    Mutant(
        "Signals",
        "trainer/shutdown.py",
        '            told.append(f"resume with: {describe_resume(self.live.folder)}")\n',
        "            pass\n",
        "tests/fault/test_signals.py::test_a_second_signal_ends_a_stop_that_hangs[hang_at_the_end]",
    ),
    Mutant(
        "Consistent weights",
        "engine/sampling/sampler.py",
        "        self.call(lambda: self._drain(adapter, change))\n",
        "        self.call(lambda: None if change is None else change())\n",
        "tests/fault/test_swaps.py::test_each_reply_is_from_the_one_version_that_it_names",
    ),
    Mutant(
        "Resuming loses nothing: overlap",
        "trainer/context.py",
        "        self._early.setdefault(epoch, [])\n",
        "        pass\n",
        "tests/fault/test_overlap.py::test_a_run_that_is_killed_while_it_samples_ahead_trains_nothing_twice",
    ),
    Mutant(
        "Same configuration, same run",
        "trainer/resume.py",
        'if facts.get("data_sha256", data) != data:\n',
        'if not facts.get("data_sha256", data):\n',
        "tests/fault/test_same_seed.py::test_other_examples_are_refused",
    ),
    Mutant(
        "Others' code needs consent",
        "trainer/resume.py",
        'is_trusted = project_root is not None or is_own_run(folder, Path(named), facts.get("seal"))',
        'is_trusted = project_root is not None or facts.get("seal") is not None',
        "tests/core/e2e/test_resume.py::test_a_run_that_was_not_made_here_imports_nothing_until_its_project_is_named",
    ),
    Mutant(
        "Untrusted text controls nothing, and no secret is repeated",
        "safe_text.py",
        '    if text.isascii() and text.isprintable():\n        return text\n    return "".join(c if _is',
        '    if text.isascii():\n        return text\n    return "".join(c if _is',
        "tests/core/test_safe_text.py",
    ),
    Mutant(
        "Every episode is accounted for",
        "trainer/epoch_collection.py",
        "        self.num_missing += len(missing)\n",
        "        self.num_missing = len(missing)\n",
        "tests/fault/test_episode_counts.py::test_missing_episodes_of_the_last_round_alone_are_too_few",
    ),
    Mutant(
        "Ray workers and nodes may die",
        "scale/ray/workers.py",
        "        while num_lost < MAX_ATTEMPTS:\n",
        "        while num_lost < 1:\n",
        "tests/fault/test_ray_faults.py::test_a_worker_that_dies_while_it_samples_costs_no_reply_and_is_replaced",
        is_slow=True,
    ),
    Mutant(
        "Long runs do not grow",
        "files.py",
        "        os.fsync(descriptor)\n    finally:\n        os.close(descriptor)\n",
        "        os.fsync(descriptor)\n    finally:\n        pass\n",
        "tests/fault/test_soak.py::test_a_long_run_does_not_grow",
        "not 2000",
        is_slow=True,
    ),
]


def find_problems(guarantees: Mapping[str, tuple[list[str], str]]) -> list[str]:
    """Returns what is wrong with the table: old text that is not there once, another test than the guarantee names.

    Args:
        guarantees: Name -> its test files and its mutation checks.
    """
    problems = [f"no change for: {name}" for name in guarantees if all(each.guarantee != name for each in MUTANTS)]
    for each in MUTANTS:
        count = (SOURCE / each.file).read_text(encoding="utf-8").count(each.old)
        if count != 1 or each.old == each.new:
            problems.append(f"{each.guarantee}: {count} times in {each.file}, expected once: {each.old!r}")
        if each.guarantee not in guarantees or each.test.partition("::")[0] not in guarantees[each.guarantee][0]:
            problems.append(f"{each.guarantee}: the guarantee does not name {each.test}")
    return problems
