"""What happens from `nanopd serve` to the first request."""

import inspect

from diagrams.drawing import Box, Picture
from nanopd.engine.core import EngineCore

STEPS = [
    ("config, checked once", "`EngineConfig`, `KVTransferConfig`: a mistake is a sentence", "plain"),
    ("device, model config, dtype", "`load_config`; float32 where bfloat16 would be emulated", "plain"),
    ("attention backend", "`choose_backend` (T4): Triton on a GPU, else the CPU's", "plain"),
    ("weights", "`load_model`: safetensors, or a GGUF converted once", "c"),
    ("profile", "`profile_peak_memory`: one step of the largest size (GPU)", "c"),
    ("plan of the blocks", "`plan_num_blocks`: what is left of the memory, in blocks", "a"),
    ("KV memory", "`KVCache.allocate`: one allocation, one layout (K1)", "a"),
    ("KV cache manager, trace", "all blocks free, hash table empty", "accent"),
    ("connector, with a role", "Transfer Engine, memory registered once, side channel", "d"),
    ("scheduler", "`max_model_len` lowered to what the pool can hold (S9)", "accent"),
    ("model runner, graphs", "buffers; `capture_graphs` for decodes (CUDA)", "c"),
    ("warm-up, then ready", "one request of one token; `/health` answers 200", "good"),
]


def draw() -> Picture:
    """Twelve steps, in the order of `EngineCore.__init__`."""
    p = Picture(
        "Start-up",
        "The order in which an engine starts: config, device, weights, memory profile, plan of the blocks, cache, "
        "connector, scheduler, runner, warm-up.",
        "EngineCore.__init__, engine/process.py",
    )
    source = inspect.getsource(EngineCore.__init__)
    names = [
        "load_config(",
        "choose_backend(",
        "load_model(",
        "profile_peak_memory(",
        "KVCache.allocate(",
        "KVCacheManager(",
    ]
    names += ["make_connector(", "Scheduler(", "ModelRunner(", "capture_graphs("]
    places = [source.index(name) for name in names]
    assert places == sorted(places), "the engine starts in another order now"
    before: Box | None = None
    for i, (name, what, kind) in enumerate(STEPS):
        column, row = divmod(i, 6)
        x, y = column * 490, row * 76
        box = p.box(x, y, "", 450, 56, kind)
        p.text(x + 14, y + 18, f"{i + 1}  {name}", bold=True, owner=box)
        p.text(x + 14, y + 38, what, owner=box)
        if before is not None and row:
            p.arrow(before.b(), box.t())
        elif before is not None:
            p.arrow(before.r(), box.l(), way="-|-")
        before = box
    return p
