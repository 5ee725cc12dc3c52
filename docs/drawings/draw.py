"""Draws every picture of the documentation: ``python docs/drawings/draw.py`` writes the SVG files.

They are committed; a test compares them with what this draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from canvas import BLUE, GREEN, GREY, RED, YELLOW, Canvas

HERE = Path(__file__).parent


def processes() -> Canvas:
    c = Canvas(720, 330, "Two workers: agent, transport, control channel and keeper of each")
    for x, title in ((10, "prefill worker"), (400, "decode worker")):
        c.frame(x, 10, 310, 310, title)
        c.box(x + 20, 40, 270, 34, "engine: its forward pass, step thread", BLUE)
        c.box(x + 20, 100, 270, 44, "agent\nprogress thread: decides, posts, retries", GREEN)
        c.box(x + 20, 176, 125, 44, "transport\n(shm, MoRI, NIXL, ...)", YELLOW)
        c.box(x + 165, 176, 125, 44, "control channel\n(zmq, keys)", YELLOW)
        c.arrow((x + 110, 74), (x + 110, 100))
        c.arrow((x + 200, 100), (x + 200, 74))
        c.text(x + 40, 91, "calls return")
        c.text(x + 208, 91, "poll()")
        c.line((x + 82, 144), (x + 82, 176))
        c.line((x + 228, 144), (x + 228, 176))
        c.box(x + 60, 256, 190, 44, "keeper: a small process\ngrants and renews, no GIL", GREY)
        c.arrow((x + 155, 220), (x + 155, 256), dashed=True)
    c.arrow((320, 196), (420, 196))
    c.arrow((420, 200), (320, 200))
    c.text(360, 160, "bytes,", anchor="middle")
    c.text(360, 175, "messages", anchor="middle")
    c.arrow((260, 278), (460, 278), dashed=True)
    c.arrow((460, 282), (260, 282), dashed=True)
    c.text(360, 262, "renewals,", anchor="middle")
    c.text(360, 300, "heartbeats", anchor="middle")
    return c


def drained() -> Canvas:
    c = Canvas(720, 270, "A call that is refused half-way: failed at once, drained later")
    c.text(20, 26, "one engine call of eight pieces; the queue has room for three", bold=True)
    for i in range(8):
        posted = i < 3
        c.box(20 + i * 52, 40, 46, 30, f"{i}", GREEN if posted else RED)
    c.text(448, 52, "0 to 2 were posted:\ntheir bytes are under way")
    c.text(604, 52, "3 to 7: refused,\nnothing happens")
    c.arrow((20, 170), (700, 170))
    c.text(660, 190, "time")
    for x, above in ((90, "post()"), (190, "FAILED"), (470, "DRAINED"), (600, "blocks are free")):
        c.line((x, 164), (x, 176))
        c.text(x, 150, above, anchor="middle", bold=True)
    c.box(190, 196, 280, 26, "pieces 0 to 2 may still land: blocks pinned", YELLOW)
    c.box(470, 196, 130, 26, "proof: none can", GREEN)
    c.text(
        20,
        248,
        "Freed at FAILED, the blocks belong to another request when the bytes of this one arrive.",
    )
    return c


def caller() -> Canvas:
    c = Canvas(720, 250, "The step thread never waits; the progress thread does the rest")
    c.text(20, 50, "step thread", bold=True)
    c.text(20, 120, "progress thread", bold=True)
    c.text(20, 190, "engine", bold=True)
    for y in (46, 116, 186):
        c.line((130, y), (700, y), dashed=True)
    for i, x in enumerate((140, 280, 420, 560)):
        c.box(x, 30, 120, 32, f"forward pass {i + 1}", BLUE)
    c.arrow((262, 46), (262, 100), text="")
    c.text(268, 84, "pull()")
    for x, text, fill in ((268, "post", GREEN), (324, "wait", GREY), (380, "post", GREEN)):
        c.box(x, 100, 50, 32, text, fill)
    c.arrow((293, 132), (293, 170))
    c.arrow((310, 170), (310, 132), dashed=True)
    c.text(316, 156, "full")
    c.arrow((405, 132), (405, 170))
    c.box(405, 170, 120, 32, "bytes move", YELLOW)
    c.arrow((525, 170), (525, 132))
    c.box(500, 100, 50, 32, "done", GREEN)
    c.arrow((550, 116), (690, 116), (690, 62))
    c.text(600, 108, "poll()")
    c.text(20, 236, "A refused post costs the transfer a wait, and the forward pass nothing.")
    return c


def classify() -> Canvas:
    c = Canvas(720, 210, "From an engine's words to an action")
    c.box(10, 70, 130, 60, "EngineError\nbackend, code,\nmessage, exception", YELLOW)
    c.arrow((140, 100), (180, 100))
    c.box(180, 70, 120, 60, "normalise\ncut hints and\nnumbers", GREY)
    c.arrow((300, 100), (340, 100))
    c.box(340, 20, 170, 160, "", GREY)
    c.text(425, 38, "rules that match", anchor="middle", bold=True)
    order = ("names the message", "names the exception", "names the code", "names the direction")
    for i, text in enumerate((*order, "names the backend", "priority, then age")):
        c.text(350, 62 + i * 20, f"{i + 1}. {text}")
    c.arrow((510, 70), (550, 70))
    c.box(550, 40, 160, 60, "Verdict\nkind, action, retried,\ndrained, rule", GREEN)
    c.arrow((510, 150), (550, 150), dashed=True)
    c.box(550, 120, 160, 60, "no rule: UNKNOWN\nnot retried, not drained,\ncounted, kept", RED)
    c.text(340, 200, "the first that differs decides: the most specific rule wins")
    return c


def leases() -> Canvas:
    c = Canvas(720, 290, "A lease of 30 seconds, counted on two clocks")
    c.text(20, 84, "reader", bold=True)
    c.text(20, 194, "producer", bold=True)
    c.line((100, 80), (700, 80), dashed=True)
    c.line((100, 190), (700, 190), dashed=True)
    c.arrow((130, 80), (200, 190))
    c.text(112, 140, "asks")
    c.arrow((200, 190), (290, 80))
    c.text(256, 140, "30 s left")
    c.box(130, 44, 400, 26, "its 30 s, counted from when it asked", GREEN)
    c.box(200, 200, 400, 26, "its 30 s, counted from when it heard", YELLOW)
    c.box(600, 200, 60, 26, "margin", GREY)
    c.line((530, 30), (530, 190), dashed=True)
    c.text(524, 24, "the reader publishes nothing after this", anchor="end")
    c.line((660, 176), (660, 246), dashed=True)
    c.text(660, 258, "the producer frees the blocks here", anchor="end")
    c.text(20, 282, "No clock is compared: the reader always ends first.")
    return c


def acks() -> Canvas:
    c = Canvas(
        720, 320, "Who reads from whom, and whose ACKs are needed, with two and with four ranks"
    )
    c.text(20, 24, "prefill tp=2, decode tp=4, eight KV heads", bold=True)
    c.text(400, 24, "prefill tp=4, decode tp=2, two KV heads", bold=True)
    for rank in range(2):
        c.box(
            60 + rank * 150,
            40,
            120,
            40,
            f"prefill {rank}\nheads {rank * 4} to {rank * 4 + 3}",
            BLUE,
        )
    for rank in range(4):
        c.box(
            20 + rank * 84, 200, 76, 40, f"decode {rank}\nheads {rank * 2}, {rank * 2 + 1}", GREEN
        )
        c.arrow((58 + rank * 84, 200), (120 + rank // 2 * 150, 80))
    c.text(
        20, 268, "Each prefill rank waits for the set of the two\ndecode ranks that read from it."
    )
    for rank in range(4):
        c.box(400 + rank * 78, 40, 70, 40, f"prefill {rank}\nhead {rank // 2}", BLUE)
    for rank in range(2):
        c.box(430 + rank * 156, 200, 100, 40, f"decode {rank}\nhead {rank}", GREEN)
        x = 470 + rank * 156
        c.arrow((x, 200), (435 + rank * 156, 80))
        c.arrow((x + 20, 200), (513 + rank * 156, 80), dashed=True)
    c.text(
        400,
        268,
        "Prefill 1 and 3 hold copies. Nobody reads\n"
        "them, but they hold the blocks as well: they\n"
        "are told, too (dashed), or never get them back.",
    )
    return c


def planner() -> Canvas:
    c = Canvas(720, 330, "The planner grows runs that are contiguous on both sides")
    c.text(20, 24, "the same request, in two caches", bold=True)
    c.text(20, 60, "prefill: block 9, then block 4; token-major")
    for block, x in ((9, 20), (4, 360)):
        for token in range(4):
            for head in range(2):
                i = token * 2 + head
                c.box(x + i * 40, 70, 38, 26, f"t{token}h{head}", GREEN if head else GREY)
        c.text(x, 112, f"block {block}")
    c.text(20, 150, "decode, tp=2, rank 1: head 1 only, in one block of eight tokens")
    for token in range(8):
        c.box(20 + token * 40, 160, 38, 26, f"t{token}h1", GREEN)
    c.text(
        20, 204, "pieces: one per token, because above, the next token's head 1 is not beside it"
    )
    c.text(20, 244, "both sides with all heads, token-major: whole blocks are runs")
    for i, (block, fill) in enumerate(((9, GREEN), (4, YELLOW))):
        c.box(20 + i * 160, 254, 150, 26, f"block {block}: 4 tokens, 2 heads", fill)
    c.text(360, 271, "pieces: one per block; neighbouring blocks join")
    c.text(
        20,
        312,
        "No case per shape: a run absorbs an axis whenever that continues it on both sides.",
    )
    return c


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    draw.__name__: draw for draw in (processes, drained, caller, classify, leases, acks, planner)
}


def main() -> None:
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
