"""Why a KV cache: what is computed in each step, with and without one."""

from diagrams.drawing import Picture

PROMPT, OUTPUT = 4, 4


def draw() -> Picture:
    """Two triangles of tokens; the right one is mostly read."""
    p = Picture(
        "Why a KV cache: prefill and decode",
        "A prompt of four tokens and four tokens of output: without a cache each step computes all tokens again, "
        "with one the first step computes the prompt and each later step one token, reading the K and V of those "
        "before it.",
        "S1",
    )
    steps = range(OUTPUT)
    without = sum(PROMPT + step for step in steps)
    with_cache = PROMPT + OUTPUT - 1
    w = 50
    for n, (title, total) in enumerate((("without a cache", without), ("with a KV cache", with_cache))):
        x = n * 476 + 60
        p.text(x, 0, title, bold=True)
        p.text(x - 60, 0, "step", kind="soft")
        for step in steps:
            y = 20 + step * 44
            p.text(x - 44, y + 17, f"{step + 1}")
            length = PROMPT + step
            cells = [(f"t{i}", "b" if n == 0 or step == 0 or i == length - 1 else "cached") for i in range(length)]
            last = p.cells(x, y, cells, w, 34)[-1]
            out = p.box(last.rect.x1 + 24, y, f"t{length}", 40, 34, "good")
            p.arrow(last.r(), out.l())
        p.text(x, 20 + OUTPUT * 44 + 14, f"{total} tokens computed", bold=True)
    p.legend(
        0, 244, [("b", "computed: K, V and all layers"), ("cached", "K and V read from the cache"), ("good", "sampled")]
    )
    p.text(
        0,
        272,
        "Step 1 is the prefill: many tokens, one pass over the weights, so arithmetic limits it. The others are "
        "decodes: one token and the\n"
        "same pass over the weights, so memory limits them. The scheduler tells neither apart: it counts tokens that "
        "are missing (S1).",
        kind="soft",
    )
    return p
