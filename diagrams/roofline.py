"""Arithmetic and memory of prefill and decode: the default model's numbers on a roofline."""

import math
from dataclasses import dataclass

import torch

from diagrams.drawing import Picture, Point
from nanopd.models.config import ModelConfig
from nanopd.worker.kv_memory import bytes_per_block

# SmolLM2-135M-Instruct's config.json.
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
PEAK, BANDWIDTH = 989e12, 3.35e12  # H100 SXM's data sheet: dense bfloat16 FLOP/s, bytes/s


@dataclass
class Step:
    """One step: so many requests, each with `new` tokens after `context` that are in the cache."""

    name: str
    requests: int
    new: int
    context: int

    @property
    def flops(self) -> float:
        """Matrix products (2 for a multiply-add), attention, and logits of one token a request."""
        m, tokens = MODEL, self.requests * self.new
        seen = sum(self.context + i + 1 for i in range(self.new)) * self.requests
        attention = 4 * m.num_layers * m.num_heads * m.head_dim * seen
        return 2 * in_layers() * tokens + attention + 2 * m.vocab_size * m.hidden_size * self.requests

    @property
    def bytes(self) -> float:
        """Weights once; K and V of the context read, of the new tokens written. In bfloat16; activations left out."""
        weights = 2 * (in_layers() + MODEL.vocab_size * MODEL.hidden_size)
        return weights + self.requests * (self.context + self.new) * bytes_per_block(MODEL, 1, torch.bfloat16)


def in_layers() -> int:
    """Weights of all layers' matrices."""
    m = MODEL
    attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)


STEPS = [Step(f"decode, {n} x 512 in cache", n, 1, 512) for n in (1, 4, 16, 128)]
STEPS += [Step(f"prefill of {n} tokens", 1, n, 0) for n in (64, 512, 2048)]


def draw() -> Picture:
    """The roof on the left, the numbers on the right."""
    p = Picture(
        "Roofline of the default model: decode waits for memory, prefill for arithmetic",
        "FLOPs a byte of steps of SmolLM2-135M in bfloat16: a decode alone does one FLOP for each byte it reads, "
        "more requests at once do more, a long prefill some hundreds; the ridge of an H100 is at 295.",
        "computed in diagrams/roofline.py",
    )
    left, top, width, height = 70.0, 0.0, 380.0, 300.0
    x_low, x_high, y_low, y_high = 0.5, 4000.0, 1e12, 2e15

    def at(intensity: float, flops: float) -> Point:
        x = left + width * math.log(intensity / x_low) / math.log(x_high / x_low)
        y = top + height * (1 - math.log(flops / y_low) / math.log(y_high / y_low))
        return Point(x, y)

    p.group(left, top, width, height)
    for tick in (1, 10, 100, 1000):
        x = at(tick, y_low).x
        p.line(Point(x, top + height), Point(x, top + height + 5))
        p.text(x, top + height + 16, f"{tick}", "middle", "soft")
    for reached, label in ((1e12, "1"), (1e13, "10"), (1e14, "100"), (1e15, "1000")):
        y = at(x_low, reached).y
        p.line(Point(left - 5, y), Point(left, y))
        p.text(left - 10, y, label, "end", "soft")
    p.text(left + width / 2, top + height + 38, "FLOPs for each byte of memory traffic", "middle")
    p.text(left + 12, top + 18, "TFLOP/s that an H100 can reach", kind="soft")
    ridge = PEAK / BANDWIDTH
    p.line(at(x_low, x_low * BANDWIDTH), at(ridge, PEAK), kind="accent-line", crosses=True)
    p.line(at(ridge, PEAK), at(x_high, PEAK), kind="accent-line", crosses=True)
    p.text(at(2.2, 1e12).x, at(1, 2.4e12).y, "waits for memory", kind="soft")
    p.text(left + width - 10, at(1, 3.2e14).y, "waits for\narithmetic", "end", "soft")
    rows = [["", "step", "GFLOP", "MB", "FLOP/B", "µs"]]
    for n, step in enumerate(STEPS, 1):
        intensity = step.flops / step.bytes
        reach = min(PEAK, intensity * BANDWIDTH)
        point = at(intensity, reach)
        p.box(point.x - 11, point.y - 11, f"{n}", 22, 22, "b" if step.new == 1 else "a", radius=11, pad=0)
        least = 1e6 * max(step.flops / PEAK, step.bytes / BANDWIDTH)
        rows.append(
            [
                f"{n}",
                step.name,
                f"{step.flops / 1e9:.1f}",
                f"{step.bytes / 1e6:.0f}",
                f"{intensity:.0f}",
                f"{least:.0f}",
            ]
        )
    p.table(480, 0, rows, (34, 196, 68, 60, 72, 50))
    p.text(
        480,
        256,
        "µs: the least an H100 could take. Decodes 1 to 4\n"
        "share the weights that they read, but each brings its\n"
        "own K and V: more than that batching cannot win.",
        kind="soft",
    )
    p.legend(480, 334, [("b", "decode"), ("a", "prefill")])
    return p
