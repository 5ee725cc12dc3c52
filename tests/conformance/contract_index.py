"""Which test holds which sentence of the Transport contract.

A sentence that is changed or added has to be entered here, with the test that fails when it is not
kept.  A name alone is a test of ``TransportTests``, so that every backend is held to it; others are
written ``file::test``.
"""

from __future__ import annotations

__all__ = ["INDEX", "WORDS"]

WORDS: tuple[str, ...] = ()
"""For a sentence that explains and promises nothing."""

_BASE = "tests/conformance/test_contract_base.py"
"""What the base classes do, the same for all backends."""
_CLOSE = "tests/backends/test_close_under_progress.py"
"""Who may be inside the engine when it ends."""

INDEX: dict[str, dict[str, tuple[str, ...]]] = {
    "transport.py": {
        "The contract between kvxfer and an engine.": WORDS,
        (
            "A backend subclasses ``Transport`` and implements the methods that begin with an "
            "underscore; the public ones check their arguments here, once for all backends."
        ): (f"{_BASE}::test_what_an_author_leaves_out",),
        "Everything convenient (retries, leases, rank mapping, ACKs) lives above.": WORDS,
        (
            "Thread rules: ``register`` and ``deregister`` may be called from any thread and may "
            "block, and so may ``close``."
        ): (
            "test_register_and_deregister_on_another_thread",
            f"{_CLOSE}::test_close_lets_progress_end_first",
        ),
        (
            "``post`` is called from one thread at a time per path, which is the agent's posting "
            "thread where ``Capabilities.may_block_in_post``, while another thread may be inside "
            "``progress``."
        ): ("test_posts_beside_progress",),
        (
            "Everything else is called from one thread, the agent's progress thread, and must not "
            "wait."
        ): ("test_calls_do_not_wait", "test_stopped_peer_holds_nobody"),
    },
    "PROGRESS_GRACE_S": {
        (
            "How long ``close`` waits for a thread that is inside ``progress``, though it was "
            "given less."
        ): (
            f"{_CLOSE}::test_close_lets_progress_end_first",
            f"{_CLOSE}::test_close_does_not_wait_for_a_stuck_thread",
        ),
        "An engine must not be ended under a thread, and a round of progress is short.": (
            f"{_CLOSE}::test_close_lets_progress_end_first",
        ),
    },
    "PeerInfo": {
        "How a peer's transport can be reached.": ("test_describes_itself",),
        "Safe to send over the control channel only.": ("test_describes_itself",),
        (
            "``incarnation`` names one life of the transport, unique for ever; ``data`` is the "
            "backend's own encoding and may hold secrets that admit whoever knows them."
        ): ("test_describes_itself", "test_another_life_is_not_taken_for_this_one"),
    },
    "Fence": {
        "The answer to ``fence`` and ``disconnect``.": (
            "test_fence_keeps_its_word",
            "test_disconnect_fails_what_is_pending",
        ),
        (
            "``done``: nothing between us and that peer's incarnation lands any more, in either "
            "memory; our attempts on it are marked drained."
        ): (
            "test_fence_keeps_its_word",
            "test_disconnect_fails_what_is_pending",
            "test_receivers_fence_stops_writes",
        ),
        "Otherwise ``reason`` says what the engine cannot prove.": ("test_fence_keeps_its_word",),
        (
            "``ours_done`` is the weaker half: nothing that *we* posted lands any more, which is "
            "all that a failed READ needs."
        ): ("test_disconnect_fails_what_is_pending",),
        "An engine that can prove only that says so.": ("test_disconnect_fails_what_is_pending",),
        (
            "``source_done``: no WRITE of ours reads our memory any more, though bytes that it has "
            "sent may still land at the peer."
        ): ("tests/mori/test_generations.py::test_fence_proves_nothing_of_a_write",),
        "That is all that the source of a failed WRITE needs.": (
            "tests/agent/test_write.py::test_a_source_that_nobody_reads_comes_back",
        ),
    },
    "Peer": {
        "A connected remote transport.": ("test_moves_exactly_the_pieces",),
        "Backends subclass it for their own state.": WORDS,
    },
    "Peer.queue": {
        (
            "The name of the queue that posts to this peer go through, unless its paths say better."
        ): (f"{_BASE}::test_each_connection_has_a_queue",),
    },
    "Path": {
        "What a transport prepared between local regions and a peer's descriptors.": (
            "test_many_regions_in_one_path",
        ),
        "``batch.pair`` indexes ``pairs``.": (
            "test_one_region_in_several_pairs",
            "test_out_of_range_is_refused",
        ),
        (
            "``close`` frees what the engine holds for it; posting on a closed path raises "
            "``StaleError``."
        ): ("test_paths_come_and_go", "test_closed_path_is_stale"),
        (
            "``queues`` names, for each pair, the queue whose room its pieces take "
            "(``Capabilities.credits`` is the room of one)."
        ): ("test_every_pair_names_its_queue", "test_no_refusal_within_credits"),
        (
            "Equal names are one queue, also between paths, peers and connections; so a queue that"
            " was made anew needs a new name."
        ): ("test_every_pair_names_its_queue", f"{_BASE}::test_each_connection_has_a_queue"),
        "By default each connection has one.": (f"{_BASE}::test_each_connection_has_a_queue",),
    },
    "Path.works_for": {
        "The ops that work between the memory kinds of every pair, as far as that was asked.": (
            "test_unsupported_op_is_refused",
        ),
    },
    "Path.max_pieces": {
        "What one post takes, as far as that was asked.": (
            "test_too_many_pieces_are_refused",
            "test_too_many_bytes_are_refused",
        ),
    },
    "Path.settled": {
        "Called by an attempt once it is drained.": ("test_done_means_drained_and_there",),
    },
    "Path.close": {
        "Idempotent.": ("test_closed_path_lets_its_attempts_finish",),
        "Attempts in flight go on.": ("test_closed_path_lets_its_attempts_finish",),
    },
    "Path.check": {
        "Refuse pieces that leave their regions.": ("test_out_of_range_is_refused",),
        (
            "Raises: InvalidInputError: names the first such piece, its range and the region's "
            "size."
        ): ("test_out_of_range_is_refused",),
    },
    "Transport": {
        "One engine of one process, from construction (bound and reachable) to ``close``.": (
            "test_describes_itself",
            "test_closed_transport_refuses",
        ),
    },
    "Transport.must_be_polled": {
        "False where every change calls the ``on_change`` waker, so that nobody has to look.": (
            "test_whoever_sleeps_is_woken",
        ),
    },
    "Transport.config_type": {
        (
            "The class of the constructor's ``config``, if its classmethod ``from_options`` makes "
            "one of a mapping of JSON values: ``create_transport`` then takes such a mapping."
        ): ("tests/backends/test_options.py::test_every_backend_takes_a_mapping",),
    },
    "Transport.revision": {
        "Rises when ``local_info`` or descriptors change: peers have to be told then.": (
            "test_describes_itself",
        ),
    },
    "Transport.capabilities": {
        "What this engine can do and promises.": ("test_describes_itself",),
        "Constant for the life of the transport.": ("test_describes_itself",),
    },
    "Transport.local_info": {
        "How peers reach this transport.": ("test_describes_itself",),
    },
    "Transport._post": {
        "Start ``attempt``.": ("test_moves_exactly_the_pieces",),
        "Raise a ``TransportError`` if and only if nothing was posted.": (
            "test_a_refused_post_has_posted_nothing",
        ),
        (
            "When it ends, now or later, from any thread: settle it (``complete``, ``fail``, "
            "``mark_drained``) and call ``_report``."
        ): (
            "test_progress_reports_every_attempt_and_nothing_else",
            f"{_BASE}::test_reports_come_from_any_thread",
        ),
    },
    "Transport._close": {
        "Free everything.": ("test_close_frees_everything",),
        "``deadline`` is seconds from now; never join a stuck thread longer.": (
            "test_close_fails_what_is_pending",
            "test_close_answers_what_was_asked",
        ),
        (
            "No ``_advance`` runs, nor will one, unless ``_progressing`` is true: then a thread is "
            "stuck inside it, and what it uses must be left alone."
        ): (
            f"{_CLOSE}::test_close_lets_progress_end_first",
            f"{_CLOSE}::test_close_does_not_wait_for_a_stuck_thread",
            f"{_CLOSE}::test_progress_after_close_asks_the_engine_nothing",
        ),
    },
    "Transport._fence": {
        "Prove that nothing of ``peer`` lands any more.": (
            "test_fence_keeps_its_word",
            "test_receivers_fence_stops_writes",
        ),
        "Default: this engine cannot.": (f"{_BASE}::test_what_an_author_leaves_out",),
    },
    "Transport.proves_end": {
        ("Whether this failure of ``connect`` proves that nothing of the peer lands any more."): (
            "tests/backends/shm/test_shm_identity.py::test_pid_of_nobody_is_a_lost_peer",
        ),
        "Default: it does not.": (f"{_BASE}::test_what_an_author_leaves_out",),
    },
    "Transport._advance": {
        "Ask a polled engine for news and ``_report`` it.": ("test_whoever_sleeps_is_woken",),
        "Default: nothing to ask.": (f"{_BASE}::test_what_an_author_leaves_out",),
    },
    "Transport._close_path": {
        "Free what the engine holds for ``path``.": ("test_paths_come_and_go",),
        "Default: nothing.": (f"{_BASE}::test_what_an_author_leaves_out",),
    },
    "Transport.cancel": {
        "Behind ``Attempt.request_cancel``.": (
            "test_cancel_lies_about_nothing",
            f"{_BASE}::test_what_an_author_leaves_out",
        ),
        "Default: the engine cannot cancel; ignored.": (
            f"{_BASE}::test_what_an_author_leaves_out",
        ),
    },
    "Transport.host_checks": {
        "What ``kvxfer doctor`` should look at, in order, before it starts the engine.": (
            "tests/doctor/test_backends.py::test_checks_of_a_plug_in",
        ),
        "Called, like the checks themselves, in a process of its own.": (
            "tests/doctor/test_backends.py::test_an_engine_that_ends_its_process",
        ),
        "Default: nothing.": ("tests/doctor/test_backends.py::test_one_crash_spoils_no_other",),
    },
    "Transport.descriptor": {
        "How peers address ``region`` now.": ("test_descriptor_addresses_the_region",),
        "Default: the same for the life of the region.": (
            f"{_BASE}::test_what_an_author_leaves_out",
        ),
    },
    "Transport._report": {
        "Tell ``progress`` that ``attempt`` changed.": (
            "test_progress_reports_every_attempt_and_nothing_else",
        ),
        "Callable from any thread.": (f"{_BASE}::test_reports_come_from_any_thread",),
    },
    "Transport._report_lost": {
        "Tell that ``peer`` has ended, its process or its transport.": (
            f"{_BASE}::test_reports_come_from_any_thread",
        ),
        "Callable from any thread.": (f"{_BASE}::test_reports_come_from_any_thread",),
        "Only on proof: what ended touches no memory any more, and never comes back.": (
            "test_lost_peers_have_ended",
        ),
        "A connection that merely broke is no proof.": (
            "test_lost_peers_have_ended",
            "test_stopped_peer_holds_nobody",
        ),
    },
    "Transport.lost_peers": {
        "Peers that ended since the last call, as far as this engine can prove it.": (
            "test_lost_peers_have_ended",
        ),
        (
            "An engine that cannot tell returns nothing: then the control channel and the "
            "deadlines have to notice."
        ): ("test_lost_peers_have_ended", f"{_BASE}::test_what_an_author_leaves_out"),
    },
    "Transport.on_change": {
        "Have ``waker`` called, from any thread, whenever ``progress`` has news.": (
            "test_whoever_sleeps_is_woken",
            f"{_BASE}::test_reports_come_from_any_thread",
        ),
        (
            "Where ``must_be_polled`` is false, nobody has to look before; elsewhere it is a mere "
            "hint."
        ): ("test_whoever_sleeps_is_woken",),
    },
    "Transport.register": {
        "Make ``span`` usable for transfers.": ("test_region_says_what_was_registered",),
        "May block; any thread.": ("test_register_and_deregister_on_another_thread",),
        "Raises: InvalidInputError: the engine cannot use this memory.": (
            "test_register_refuses_memory_it_cannot_use",
        ),
        "TransportError: the engine refused.": (
            f"{_BASE}::test_what_the_engine_raises_goes_through",
        ),
    },
    "Transport.deregister": {
        "Undo ``register``.": ("test_deregistered_region_is_stale", "test_registered_again"),
        "Idempotent once it has succeeded.": ("test_deregister_waits_until_drained",),
        "May block; any thread.": ("test_register_and_deregister_on_another_thread",),
        "``close`` undoes every registration: afterwards there is nothing left to do.": (
            "test_closed_transport_refuses",
            "test_close_frees_everything",
        ),
        "Raises: RegionBusyError: an attempt that is not drained still uses the region.": (
            "test_deregister_waits_until_drained",
        ),
    },
    "Transport.connect": {
        "Reach a peer: the answer is a ``Peer`` only if that incarnation was found alive.": (
            "test_nobody_there_is_an_error_value",
            "test_another_life_is_not_taken_for_this_one",
        ),
        (
            "Otherwise it is a ``HandshakeError``, ``PeerLostError`` or another error of ours, "
            "also for ``info`` that was damaged on its way."
        ): ("test_nobody_there_is_an_error_value", "test_damaged_peer_info_is_an_error_value"),
        "Raises: InvalidInputError: ``info`` is of another transport.": (
            "test_prepare_refuses_what_is_not_ours",
        ),
    },
    "Transport.prepare": {
        "Prepare posts between local regions and the peer's descriptors, many at once.": (
            "test_many_regions_in_one_path",
        ),
        (
            "Raises: StaleError: the peer is closed, a descriptor is of another incarnation of it,"
            " or a region is not registered here (any more)."
        ): (
            "test_disconnected_peer_is_stale",
            "test_other_incarnation_is_stale",
            "test_deregistered_region_is_stale",
        ),
        "InvalidInputError: no pairs, or a descriptor of another transport.": (
            "test_prepare_refuses_what_is_not_ours",
        ),
    },
    "Transport.post": {
        "Hand ``batch`` to the engine, once.": (
            "test_post_takes_what_it_is_given",
            "test_parallel_attempts",
        ),
        "No sleep, no retry.": ("test_calls_do_not_wait", "test_a_refused_post_has_posted_nothing"),
        "Either raises, and nothing was posted, or returns an ``Attempt``.": (
            "test_a_refused_post_has_posted_nothing",
        ),
        "An empty batch is DONE at once.": ("test_empty_batch_is_done_at_once",),
        "Raises: StaleError: the path or its peer is closed, or a region was deregistered.": (
            "test_closed_path_is_stale",
            "test_disconnected_peer_is_stale",
            "test_deregistered_region_is_stale",
        ),
        (
            "InvalidInputError: pieces outside their regions, too many or too large for one post, "
            "or an op and memory kinds the engine cannot do."
        ): (
            "test_out_of_range_is_refused",
            "test_too_many_pieces_are_refused",
            "test_too_many_bytes_are_refused",
            "test_unsupported_op_is_refused",
        ),
        "BackpressureError, TransportError: the engine refused and posted nothing.": (
            "test_a_refused_post_has_posted_nothing",
        ),
    },
    "Transport.progress": {
        "Attempts whose state or ``drained`` changed since the last call, at most ``budget``.": (
            "test_progress_reports_every_attempt_and_nothing_else",
        ),
        "An attempt can appear again when it drains after it failed.": (
            "test_a_time_out_is_not_overwritten",
        ),
        "Cost does not depend on peers, paths or regions that are idle.": (
            "test_idle_things_cost_nothing",
        ),
        "After ``close`` it returns what was not collected yet.": (
            "test_close_fails_what_is_pending",
        ),
    },
    "Transport.fence": {
        "Ask for the proof that nothing of this peer's incarnation lands any more.": (
            "test_fence_keeps_its_word",
        ),
    },
    "Transport.disconnect": {
        (
            "Close ``peer`` and its paths; every pending attempt on it is failed by our own ledger."
        ): ("test_disconnect_fails_what_is_pending", "test_disconnected_peer_is_stale"),
        "Those attempts are reported through ``progress`` like any other.": (
            "test_disconnect_fails_what_is_pending",
        ),
        "Idempotent.": ("test_disconnect_fails_what_is_pending",),
    },
    "Transport.close": {
        (
            "The one call that may come from any thread: where another one is inside ``progress``, "
            "it waits for that first, at least for ``PROGRESS_GRACE_S``."
        ): (
            f"{_CLOSE}::test_close_lets_progress_end_first",
            f"{_CLOSE}::test_close_does_not_wait_for_a_stuck_thread",
        ),
        "Close everything within ``deadline`` seconds; returns what was not drained by then.": (
            "test_close_fails_what_is_pending",
        ),
    },
    "attempt.py": {
        "One engine post and what became of it.": WORDS,
    },
    "AttemptState": {
        "PENDING, then DONE or FAILED for ever.": ("test_terminal_state_is_final",),
    },
    "Accepted": {
        "How much of the batch the engine took.": (
            "test_done_means_drained_and_there",
            "test_a_refused_post_has_posted_nothing",
        ),
    },
    "Attempt": {
        "One engine post.": WORDS,
        "The first terminal state wins.": (
            "test_terminal_state_is_final",
            "test_a_time_out_is_not_overwritten",
            f"{_BASE}::test_the_first_terminal_state_wins",
        ),
        (
            "``drained`` is a fact of its own: True once no engine can touch the memory any more "
            "on behalf of this attempt, with ``drained_by`` naming the proof."
        ): ("test_done_means_drained_and_there", "test_deregister_waits_until_drained"),
        "DONE implies drained; FAILED does not.": (
            "test_done_means_drained_and_there",
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
        "Readers may look at the attributes from any thread.": ("test_posts_beside_progress",),
        (
            "``complete``, ``fail`` and ``mark_drained`` are for the backend that owns the "
            "attempt, also from any thread; each returns whether it changed anything."
        ): (
            f"{_BASE}::test_the_first_terminal_state_wins",
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
    },
    "Attempt.handle": {
        "The backend's own; nobody else looks at it.": WORDS,
    },
    "Attempt.complete": {
        "All bytes of the batch moved, to the degree ``Capabilities.visibility`` promises.": (
            "test_done_means_drained_and_there",
        ),
        (
            "Coming after a failure (ours, such as a time-out), it cannot change the state, but it"
            " is the proof that the attempt is drained."
        ): (
            "test_a_time_out_is_not_overwritten",
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
    },
    "Attempt.fail": {
        "It failed.": (f"{_BASE}::test_failed_and_drained_are_two_facts",),
        "``drained_by`` names the proof that nothing lands later, if there is one.": (
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
        "With ``accepted=NONE`` nothing was posted, which is proof by itself.": (
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
        "After an earlier failure only the proof counts.": (
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
    },
    "Attempt.mark_drained": {
        "A failed attempt's proof arrived.": (f"{_BASE}::test_failed_and_drained_are_two_facts",),
        "A pending attempt must be failed first.": (
            f"{_BASE}::test_failed_and_drained_are_two_facts",
        ),
    },
    "Attempt.request_cancel": {
        "Ask the engine to give up, where ``Capabilities.cancel`` says it can.": (
            "test_cancel_lies_about_nothing",
        ),
    },
    "capabilities.py": {
        "What an engine can do and what its DONE means.": WORDS,
    },
    "Visibility": {
        "What DONE says about the destination, in rising order.": (
            "test_done_means_drained_and_there",
        ),
    },
    "Visibility.ACCEPTED": {
        "The engine took the bytes; they may still be under way.": (
            "test_done_means_drained_and_there",
        ),
    },
    "Visibility.ACKED": {
        "The other side's engine acknowledged them.": ("test_done_means_drained_and_there",),
    },
    "Visibility.VISIBLE": {
        "The destination's owner can read them.": (
            "test_done_means_drained_and_there",
            "test_moves_exactly_the_pieces",
        ),
    },
    "Signal": {
        "Whether the engine can notify the peer by itself.": WORDS,
    },
    "FenceScope": {
        "What has to go so that nothing lands any more: the smallest thing that proves it.": (
            "test_fence_keeps_its_word",
            "test_receivers_fence_stops_writes",
            "test_deregister_stops_writes",
        ),
    },
    "DataPathAuth": {
        "Whether the engine's own ports admit strangers (NONE) or only holders of a secret.": (
            "test_damaged_peer_info_is_an_error_value",
        ),
    },
    "Capabilities": {
        "Constant facts about an engine.": ("test_describes_itself",),
        "Sizes are bytes.": ("test_too_many_bytes_are_refused",),
    },
    "Capabilities.ops": {
        "(op, local kind, remote kind) that work.": (
            "test_moves_exactly_the_pieces",
            "test_unsupported_op_is_refused",
        ),
    },
    "Capabilities.visibility": {
        "What DONE says of a WRITE, and of a READ too unless ``read_visibility`` says more.": (
            "test_done_means_drained_and_there",
        ),
    },
    "Capabilities.read_visibility": {
        "Where a READ promises more: its destination is our own memory.": (
            "test_done_means_drained_and_there",
        ),
    },
    "Capabilities.max_pieces": {
        "Most pieces one post takes.": ("test_too_many_pieces_are_refused",),
    },
    "Capabilities.max_nbytes": {
        "Most bytes one post takes.": ("test_too_many_bytes_are_refused",),
    },
    "Capabilities.credits": {
        (
            "Pieces in flight per queue (``Path.queues``; by default one per connection) before "
            "the engine refuses; None where it does not."
        ): ("test_no_refusal_within_credits",),
    },
    "Capabilities.atomic_refusal": {
        "A refused post has posted nothing.": ("test_a_refused_post_has_posted_nothing",),
    },
    "Capabilities.may_block_in_post": {
        "``post`` may wait inside the engine: the agent posts from a thread of its own.": (
            "test_calls_do_not_wait",
        ),
    },
    "Capabilities.ip_versions": {
        "IP versions the engine can reach peers over; empty where it uses no network.": (
            "test_describes_itself",
            "tests/net/test_two_hosts.py::test_reads_and_writes_cross",
        ),
    },
    "Capabilities.process_local": {
        "Only peers inside the same process can be reached.": ("test_describes_itself",),
    },
    "Capabilities.visible": {
        "What DONE says of ``op``.": ("test_done_means_drained_and_there",),
    },
    "pollable.py": {
        "Things that can take a while, without anything that waits.": WORDS,
    },
    "Pollable": {
        "The answer to something slow.": ("test_calls_do_not_wait",),
        "``poll`` never waits and may be called from any thread.": (
            "test_calls_do_not_wait",
            "test_answers_are_for_any_thread",
        ),
    },
    "Pollable.poll": {
        "``(None, None)`` while pending, then ``(value, None)`` or ``(None, error)`` for ever.": (
            "test_moves_exactly_the_pieces",
            f"{_BASE}::test_answers_are_final",
        ),
    },
    "Ready": {
        "Already answered.": (f"{_BASE}::test_answers_are_final",),
    },
    "Deferred": {
        "Answered later, from any thread.": (f"{_BASE}::test_answers_are_final",),
        "The first answer wins; later ones are ignored.": (f"{_BASE}::test_answers_are_final",),
    },
}
