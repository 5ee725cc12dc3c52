"""One-line sabotages of shipped files: each breaks one promise, and the simulator must notice.

Written down before the checker was run on them.  ``old`` occurs exactly once in the file.
"""

from __future__ import annotations

import attrs

_MIXED = ("--seeds", "40", "--transfers", "100", "--harsh", "2")
_CALM = (*_MIXED, "--profile", "calm")
_LEASES = (*_MIXED, "--profile", "leases")
_FENCES = (*_MIXED, "--profile", "fences")
_NETWORK = (*_MIXED, "--profile", "network", "--transfers", "200")
_AGAIN = ("--harsh", "1", "--consumers", "1", "--set", "retry_elsewhere=1", "--set", "writes=0")
_AGAIN = (*_AGAIN, "--set", "delay=0.1", "--set", "rate=20")
"""Readers that failed read again, often on the same process."""
_FENCED = (*_NETWORK, "--transfers", "100", "--set", "writes=1", "--set", "abort=0.4")
_FENCED = (*_FENCED, "--set", "delay=0.3", "--set", "fence_impossible=0")
"""Pushes that are given up at once by sides that do not hear of each other, and whole fences."""
_BREAKERS = ("--profile", "calm", "--producers", "6", "--consumers", "7", "--transfers", "500")
_BREAKERS = (*_BREAKERS, "--seed", "22", "--seeds", "4")
"""So many transfers of healthy processes that a circuit breaker opens between two of them."""


@attrs.frozen(kw_only=True)
class Sabotage:
    """``promise`` is what is broken; ``options`` of ``kvxfer sim`` make what shows it common."""

    name: str
    promise: str
    file: str
    old: str
    new: str
    options: tuple[str, ...] = _MIXED


SABOTAGES = (
    Sabotage(
        name="undrained-is-drained",
        promise="3: blocks are not handed back before drained",
        file="agent/part.py",
        old="return all(a.drained for a in self.undrained) and not any(",
        new="return not any(",
    ),
    Sabotage(
        name="done-before-the-end",
        promise="1: done only when one attempt of each piece succeeded",
        file="agent/part.py",
        old="return self.settled and self.drained and self.error is None and not self.stopped",
        new="return self.error is None and not self.stopped",
    ),
    Sabotage(
        name="credits-are-kept",
        promise="8: tables are empty at the end",
        file="agent/part.py",
        old="            self.link.poster.settled(self.undrained.pop(attempt))",
        new="            self.undrained.pop(attempt)",
    ),
    Sabotage(
        name="failed-pull-says-drained",
        promise="3: FAILED and drained are two facts",
        file="agent/pull.py",
        old="        drained = all(part.drained for part in parts)",
        new="        drained = True",
    ),
    Sabotage(
        name="pull-without-deadline",
        promise="4: every transfer ends by its deadline",
        file="agent/pull.py",
        old="        if now >= self._deadline:\n            self.fail(self._timeout(",
        new="        if now < 0:\n            self.fail(self._timeout(",
    ),
    Sabotage(
        name="published-after-the-lease",
        promise="5: the reader publishes only what completed before its own lease end",
        file="agent/pull.py",
        old="            if source.read and self._ctx.clock.now() > source.granted_until:",
        new="            if source.read and self._ctx.clock.now() < 0:",
        options=_LEASES,
    ),
    Sabotage(
        name="lease-from-receipt",
        promise="5: the reader counts from when it sent",
        file="agent/pull.py",
        old="source.granted_until = max(source.granted_until, sent + remaining)",
        new="source.granted_until = max(source.granted_until, now + remaining)",
        options=_LEASES,
    ),
    Sabotage(
        name="no-release",
        promise="4: the producer ends by the release, not only by its lease",
        file="agent/pull.py",
        old="        self._release(ok=True, now=now)",
        new="        pass",
        options=_CALM,
    ),
    Sabotage(
        name="renewal-keeps-the-old-timer",
        promise="5: a held source is freed at lease end plus margin, as granted",
        file="core/leases.py",
        old=(
            "        entry.granted_until = entry.ends_at\n"
            "        self._timers.set(transfer_id, entry.ends_at + self.margin)"
        ),
        new=(
            "        entry.granted_until = entry.ends_at\n"
            "        self._timers.set(transfer_id, now + self.margin)"
        ),
        options=_LEASES,
    ),
    Sabotage(
        name="holds-never-expire",
        promise="4: expiry needs no message and no new submission",
        file="core/leases.py",
        old="        for transfer_id in self._timers.pop_due(now):",
        new="        for transfer_id in self._timers.pop_due(-1.0):",
    ),
    Sabotage(
        name="never-sent-again",
        promise="6: messages that matter are re-sent until confirmed",
        file="core/reliable.py",
        old="            frames.append(entry.frame)\n            self.resent += 1",
        new="            self.resent += 1",
        options=_CALM,
    ),
    Sabotage(
        name="pins-stay",
        promise="8: tables are empty at the end",
        file="core/inflight.py",
        old="                owner[mine] = 0",
        new="                owner[mine] = token",
    ),
    Sabotage(
        name="half-a-fence-for-write",
        promise="3: for WRITE only the receiver's own whole fence proves it",
        file="agent/draining.py",
        old="            elif not (answer.done if self._op is Op.WRITE else answer.ours_done):",
        new="            elif not (answer.done or answer.ours_done):",
        options=(*_FENCES, "--harsh", "1", "--transfers", "150"),
    ),
    Sabotage(
        name="drained-by-patience",
        promise="3: what cannot be proven is quarantined, not handed back",
        file="agent/draining.py",
        old=(
            "        if self._is_drained():\n"
            '            self._finish("fence" if self._fences is not None else "proof", now)'
        ),
        new=(
            "        if self._is_drained() or now >= self._deadline:\n"
            '            self._finish("fence" if self._fences is not None else "proof", now)'
        ),
        options=_FENCES,
    ),
    Sabotage(
        name="silent-quarantine",
        promise="3: quarantine is visible",
        file="agent/draining.py",
        old="            self._enter_quarantine(now)",
        new="            self.quarantined = True",
        options=_FENCES,
    ),
    Sabotage(
        name="sealed-before-it-landed",
        promise="12: success means that the bytes are there",
        file="agent/push.py",
        old=(
            "            if len(target.parts) < len(self._specs) "
            "or not all(p.done for p in target.parts):"
        ),
        new="            if len(target.parts) < len(self._specs):",
    ),
    Sabotage(
        name="pushed-before-it-is-ready",
        promise="12: nothing is posted before ready.query() is true",
        file="agent/push.py",
        old="            if ready is not None and not self._query(ready, now):",
        new="            if ready is not None and not ready:",
    ),
    Sabotage(
        name="confirmation-is-success",
        promise="4: Sent means that the consumer received it",
        file="agent/push.py",
        old="on_confirm=None if speaks_sealed else partial(self._confirmed, target),",
        new="on_confirm=partial(self._confirmed, target),",
        options=_CALM,
    ),
    Sabotage(
        name="accept-forgets-its-writers",
        promise="3: destination blocks are not handed back while a peer may write",
        file="agent/accept.py",
        old="        return all(writer.drained for writer in self._writers.values())",
        new="        return True",
        options=_FENCES,
    ),
    Sabotage(
        name="push-without-deadline",
        promise="4: every transfer ends by its deadline",
        file="agent/push.py",
        old="        elif now >= self._deadline:\n            self.fail(self._timeout(",
        new="        elif now < 0:\n            self.fail(self._timeout(",
        options=_NETWORK,
    ),
    Sabotage(
        name="early-messages-are-kept",
        promise="8: every table is bounded in time",
        file="agent/sweeper.py",
        old="        for table in self._tables:\n            table.expire(now)",
        new="        for table in self._tables:\n            table.next_at()",
    ),
    Sabotage(
        name="accept-without-deadline",
        promise="4: every transfer ends by its deadline, even if every message is lost",
        file="agent/accept.py",
        old="        if self.error is None and now >= self._deadline:",
        new="        if self.error is None and now < 0:",
    ),
    # What the simulator once found in our own code, broken again: the way it was before its fix.
    # One is missing: a late grant of before a fence (``tests/agent/test_ended_links.py``).
    Sabotage(
        name="release-of-a-failed-pull-ends-the-next",
        promise="5: blocks are held as long as a reader holds a grant",
        file="agent/producer.py",
        old="            again = seq and hold.opened.get(sender, -1) > seq",
        new="            again = False",
        options=(*_MIXED, *_AGAIN),
    ),
    Sabotage(
        name="renewal-uses-a-whole-core",
        promise="7: nothing spins while it waits for a link",
        file="agent/renewal.py",
        old="self._ctx.at(self, min(self._until, self._next_at) if link.up else self._until)",
        new="self._ctx.at(self, min(self._until, self._next_at))",
    ),
    Sabotage(
        name="grant-outlives-the-connection",
        promise="3: nothing is posted under a grant that the consumer has fenced",
        file="agent/push.py",
        old="            if _session(link) != target.session:",
        new="            if _session(link) < 0:",
        options=_FENCED,
    ),
    Sabotage(
        name="mail-ends-with-the-link",
        promise="6: a release is sent until it is confirmed, also when the link has failed",
        file="agent/mailbox.py",
        old="            self._owner.dial(address)._take_over(self, now)",
        new="            self._owner.dial(address)",
        options=_BREAKERS,
    ),
)
