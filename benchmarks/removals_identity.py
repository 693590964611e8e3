"""Protections of ``protections.py``: whose answer is whose, what is freed, and what outlives a death."""

from removal import API, ENGINE, SERVE, TEST_API, TEST_ENGINE, TEST_SERVE, Removal

IDENTITY = (
    Removal(
        "codec batch: one output per request",
        ENGINE + "batches.py",
        'check_length("a batch", len(items), len(outputs))',
        "outputs = [outputs[i % len(outputs)] for i in range(len(items))]",
        TEST_ENGINE + "codec.py::test_a_wrong_number_of_outputs_is_never_broadcast",
    ),
    Removal(
        "codec windows: one output per window",
        ENGINE + "codec.py",
        "        if len(outputs) != len(windows):\n            raise BatchLengthError(",
        "        outputs = [outputs[i % len(outputs)] for i in range(len(windows))]\n"
        "        if len(outputs) != len(windows):\n            raise BatchLengthError(",
        TEST_ENGINE + "codec.py::test_a_wrong_number_of_outputs_is_never_broadcast",
    ),
    Removal(
        "AR step: one frame per row",
        ENGINE + "ar_loop.py",
        'check_length("a step", len(rows), len(results))',
        "results = [results[i % len(results)] for i in range(len(rows))]",
        TEST_ENGINE + "ar_feeds.py::test_a_wrong_number_of_frames_is_never_handed_out",
    ),
    Removal(
        "AR step read late: one frame per row",
        ENGINE + "ar_frames.py",
        'check_length("a step", len(before.rows), len(done.frames))',
        "pass",
        TEST_ENGINE + "ar_feeds.py::test_a_wrong_number_of_frames_is_never_handed_out",
    ),
    Removal(
        "AR text step: one row of logits per row",
        ENGINE + "ar_text.py",
        'check_length("the logits of a step", len(rows), len(logits))',
        "logits = logits.expand(len(rows), -1)",
        TEST_ENGINE + "ar.py::test_logits_of_one_row_are_never_broadcast",
    ),
    Removal(
        "one bad item fails alone",
        ENGINE + "batches.py",
        "            if len(items) == 1:\n                return [error]\n"
        "            return [self._step([item])[0] for item in items]",
        "            return [error for _ in items]",
        TEST_ENGINE + "codec.py::test_only_the_guilty_request_fails",
    ),
    Removal(
        "sound must follow on what was sent",
        API + "sound.py",
        "if chunk.position != self._position:",
        "if False:",
        TEST_API + "chat.py::test_broken_audio_fails_the_request",
    ),
    Removal(
        "request ids are ours, and never alike",
        API + "request_log.py",
        "default_factory=lambda: secrets.token_hex(16)",
        'default_factory=lambda: ""',
        TEST_API + "http.py::test_request_ids",
    ),
    Removal(
        "no seed: a random one",
        API + "service.py",
        "secrets.randbelow(MAX_SEED + 1) if seed is None else seed",
        "0 if seed is None else seed",
        TEST_API + "chat.py::test_what_the_stages_get",
    ),
    Removal(
        "samples carry their request's voice and seed",
        "omni_ray/models/ramp/stages.py",
        '        faults, tag = faults_of(request, options, "thinker"), tag_of(request)\n',
        '        faults = faults_of(request, options, "thinker")\n'
        '        tag = self.__dict__.setdefault("first", tag_of(request))\n',
        TEST_SERVE + "ramp.py::test_stream_equals_oracle[25-1]",
    ),
    Removal(
        "an unknown voice is refused",
        API + "voices.py",
        "    listed = ",
        "    return voices.default or voices.names[0]\n    listed = ",
        TEST_API + "speech.py::test_refused_before_anything_starts",
    ),
)

CANCELLATION = (
    Removal(
        "a consumer that stops cancels its producer",
        SERVE + "stage_client.py",
        "        response.cancel()",
        "        pass",
        TEST_SERVE + "faults.py::test_hanging_up_stops_every_stage",
    ),
    Removal(
        "a client that left is noticed",
        API + "live.py",
        "gone = asyncio.create_task(_until_disconnect(receive))",
        "gone = asyncio.create_task(asyncio.sleep(1e9))",
        TEST_API + "http.py::test_the_stream_stops_when_the_client_leaves",
    ),
    Removal(
        "a place is given back",
        ENGINE + "admission.py",
        "        finally:\n            self._running -= 1\n            self._call_next()",
        "        finally:\n            pass",
        TEST_ENGINE + "admission.py::test_failure_inside_frees_the_place",
    ),
    Removal(
        "a cancelled row leaves the batch",
        ENGINE + "ar_loop.py",
        "        row.cancelled = True\n",
        "",
        TEST_ENGINE + "ar.py::test_cancelling_frees_the_slot_within_one_step",
    ),
    Removal(
        "a cancelled request closes its upstream generator",
        ENGINE + "generator.py",
        "            stack.callback(run.cancel)\n",
        "",
        TEST_ENGINE + "generator.py::test_cancel_closes_the_generator_on_its_own_thread",
    ),
    Removal(
        "the codec's state is closed",
        ENGINE + "codec.py",
        "                self._batches.after_step(self._codec.close, state)",
        "                pass",
        TEST_ENGINE + "codec.py::test_only_the_guilty_request_fails",
    ),
    Removal(
        "a killed consumer stops a producer of refs (lifeline)",
        SERVE + "running_stage.py",
        "            end.lost.add_done_callback(",
        "            (lambda _: None)(",
        TEST_SERVE + "faults.py::test_a_killed_consumer_stops_its_producers[talker-thinker-actor path]",
    ),
    Removal(
        "refs of a stream that ended badly are dropped",
        SERVE + "running_stage.py",
        "        if not complete:\n            run.abandon()\n"
        "        if run.refs_travel and (run.cut_off or not complete):\n            self._collector.soon()",
        "",
        TEST_SERVE + "faults.py::test_latent_refs_are_freed",
    ),
    Removal(
        "refs are held until they were read",
        SERVE + "stage_run.py",
        "            self._end.hold(event.ref, event.ref_bytes)",
        "            pass",
        TEST_SERVE + "stage_death.py::test_a_node_leaves_and_another_one_is_lost",
    ),
    Removal(
        "unread latents are bounded by a window",
        SERVE + "window.py",
        "while self._sent > self._read and self._sent + nbytes - self._read > self._window:",
        "while False:",
        TEST_SERVE + "lifeline.py::TestWindow",
    ),
    Removal(
        "a stranger may not be a lifeline",
        SERVE + "lifeline.py",
        "known = next((t for t in self._ends if hmac.compare_digest(t.encode(), given)), None)",
        "known = next(iter(self._ends), None)",
        TEST_SERVE + "lifeline.py::TestStrangers",
    ),
)

REPAIR = (
    Removal(
        "a request that showed nothing is tried again",
        SERVE + "attempts.py",
        "self._retries = 1 if config.retry else 0",
        "self._retries = 0",
        TEST_SERVE + "records.py::test_nothing_shown_is_retried_once",
    ),
    Removal(
        "once, and no more",
        SERVE + "attempts.py",
        "            self._retries -= 1\n",
        "",
        TEST_SERVE + "records.py::test_nothing_shown_is_retried_once",
    ),
    Removal(
        "a stream that spoke is taken over",
        SERVE + "attempts.py",
        "self._takeovers = config.max_takeovers if config.takeover else 0",
        "self._takeovers = 0",
        TEST_SERVE + "records.py::test_what_spoke_is_taken_over_with_its_records",
    ),
    Removal(
        "what was heard is not sent again",
        SERVE + "records.py",
        "        return min(count, known - position)",
        "        return 0",
        TEST_SERVE + "records.py::test_frames_and_sound_are_given_out_once",
    ),
    Removal(
        "a poison request is not taken over for ever",
        SERVE + "attempts.py",
        "if not self._takeovers or self._alone >= POISONED:",
        "if not self._takeovers:",
        TEST_SERVE + "records.py::test_alone_on_two_that_died",
    ),
    Removal(
        "other code never goes on with a request",
        SERVE + "stage_run.py",
        "if recorded.version != self._parts.opened.version:",
        "if False:",
        TEST_SERVE + "graceful.py::test_other_code_never_goes_on_with_a_request",
    ),
    Removal(
        "an engine that cannot go on says so",
        SERVE + "attempts.py",
        "if fixed := [name for name, opened in self._known.items() if not opened.resumable]:",
        "if fixed := list[str]():",
        TEST_SERVE + "records.py::test_an_engine_that_cannot_go_on",
    ),
    Removal(
        "chat: an error in mid-stream is one error event",
        API + "chat.py",
        '            yield sse.failure("chat", error_body(public_error(error, info.request_id)))',
        "            pass",
        TEST_API + "chat.py::test_failure_after_chunk_three",
    ),
    Removal(
        "speech events: an error in mid-stream is one error event",
        API + "speech.py",
        '            yield sse.failure("speech", error_body(public_error(error, info.request_id)))',
        "            pass",
        TEST_API + "speech.py::test_failure_in_mid_stream",
    ),
    Removal(
        "raw speech: an error in mid-stream cuts the connection",
        API + "live.py",
        "                raise AbortedResponse(public_error(error, self._info.request_id).message) from error",
        "                await writer.end()",
        TEST_API + "speech.py::test_raw_bytes_that_are_not_all_cut_the_connection",
    ),
    Removal(
        "a stream without every finish is an error",
        API + "deltas.py",
        "    if ends.waiting:\n        raise StageFailedError(",
        "    if False:\n        raise StageFailedError(",
        TEST_API + "chat.py::test_stream_that_ends_without_every_finish_is_an_error",
    ),
    Removal(
        "a replica whose engine died ends",
        SERVE + "running_stage.py",
        "        except EngineDiedError as error:\n            _leave(error)\n\n    def state",
        "        except EngineDiedError:\n            pass\n\n    def state",
        TEST_SERVE + "stage_death.py::test_an_engines_child_process_dies_idle",
    ),
)
