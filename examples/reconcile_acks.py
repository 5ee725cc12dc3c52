"""Only the bookkeeping of ACKs: a producer of your own learns when it may free a request's blocks.

The producer below has its own engine and its own messages.  What it hands over here are facts:
who has to acknowledge what, which ACK arrived, and what time it is.  ACKs may come before the
producer knows the request, twice, for the request before, or never.

Run: python examples/reconcile_acks.py
"""

from __future__ import annotations

from kvxfer.core.acks import Ack, AckOutcome, AckReconciler

FREES = (AckOutcome.COMPLETE, AckOutcome.DECLINED, AckOutcome.EXPIRED)


class Producer:
    """Frees a request's blocks once all decode ranks have read them, or the time is up."""

    def __init__(self) -> None:
        # 30 s and 1,024 ids bound what strangers can make us remember.
        self.acks = AckReconciler(early_ttl=30.0, early_capacity=1024)
        self.blocks: dict[str, list[int]] = {}
        self.free: list[int] = []

    def prefilled(self, request: str, blocks: list[int], *, ranks: range, now: float) -> None:
        """The request's blocks wait for ``ranks`` of decode, at most 60 s."""
        self.blocks[request] = blocks
        result = self.acks.expect(
            request, sources=ranks, owners=[request], deadline=now + 60.0, now=now
        )
        if result is not None:  # every ACK was there before
            self._free(result.owners)

    def on_ack(self, request: str, rank: int, now: float, *, declined: bool = False) -> AckOutcome:
        """A message arrived, from anybody."""
        result = self.acks.record(Ack(transfer_id=request, source=rank, declined=declined), now)
        if result.outcome in FREES:
            self._free(result.owners)
        return result.outcome

    def tick(self, now: float) -> None:
        """Called by whatever loop there is; ``next_at`` says when it pays."""
        for result in self.acks.poll(now):
            print(f"{result.transfer_id}: ranks {sorted(result.missing)} never answered")
            self._free(result.owners)

    def _free(self, owners: tuple[str, ...]) -> None:
        for request in owners:
            self.free += self.blocks.pop(request)


def main() -> None:
    producer = Producer()
    two = range(2)

    # The usual case, with a repeated message: a duplicate is no second rank.
    producer.prefilled("a", [1, 2], ranks=two, now=0.0)
    outcomes = [producer.on_ack("a", rank, now=1.0) for rank in (0, 0, 1, 1)]
    print("a:", ", ".join(outcome.value for outcome in outcomes))
    assert producer.free == [1, 2]

    # ACKs that overtake the producer's own scheduler are kept for it.
    for rank in two:
        assert producer.on_ack("b", rank, now=2.0) is AckOutcome.EARLY
    producer.prefilled("b", [3], ranks=two, now=2.1)
    assert producer.free == [1, 2, 3]

    # Decode gives a request up: one word stands for all its ranks.
    producer.prefilled("c", [4], ranks=two, now=3.0)
    producer.on_ack("c", 0, now=3.1, declined=True)
    assert producer.free == [1, 2, 3, 4]

    # Nobody answers: the blocks come back all the same, and what follows is late.
    producer.prefilled("d", [5], ranks=two, now=4.0)
    producer.on_ack("d", 0, now=5.0)
    assert producer.acks.next_at() == 64.0
    producer.tick(now=64.0)
    assert producer.free == [1, 2, 3, 4, 5]
    assert producer.on_ack("d", 1, now=65.0) is AckOutcome.STALE

    # A flood of ACKs for ids that never come is bounded and counted.
    for n in range(5000):
        producer.on_ack(f"unknown-{n}", 0, now=66.0)
    print(f"remembered {len(producer.acks.early)} of 5000 unknown ids")
    print({name: count for name, count in producer.acks.counters.items() if count})


if __name__ == "__main__":
    main()
