"""All layers share one block table; how large a layer's pages are in the example of the drawing."""

import torch

from diagrams.drawing import Picture
from nanopd.models.config import ModelConfig
from nanopd.worker.kv_memory import bytes_per_block

NUM_LAYERS, NUM_BLOCKS, GIB_PER_LAYER = 48, 147_456, 1.125  # the drawing's


def draw() -> Picture:
    """A block table on the left, the layers' pages on the right."""
    p = Picture(
        "One block table for all layers",
        "The block table of a request names block ids; in each of 48 layers the block with that id holds the K and V "
        "of the same tokens.",
        "K1; nanopd/worker/kv_memory.py",
    )
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 1}
    rest = {"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 300, "max_position_embeddings": 512}
    model = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | sizes | rest)
    block_bytes = int(GIB_PER_LAYER * 2**30) // NUM_BLOCKS
    assert block_bytes * NUM_BLOCKS == GIB_PER_LAYER * 2**30
    assert bytes_per_block(model, 16, torch.float16) == block_bytes * NUM_LAYERS
    a_request = (8192 + 1024) // 16
    p.text(0, 0, "block table of a request")
    p.cells(0, 18, [("B3", "a"), ("B7", "a"), ("B8", "a")], 60, 36)
    p.text(0, 76, "B3 holds its tokens 0 to 15,\nin every layer", kind="soft")
    for n, layer in enumerate(["layer 0", "layer 1", "…", "layer 47"]):
        y = n * 58
        if layer == "…":
            p.text(
                560, y + 18, "…  and so on: each layer has pages of its own, under the same numbers", "middle", "soft"
            )
            continue
        p.text(290, y + 18, layer, "end")
        names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "…", "147455"]
        x = 310.0
        for name in names:
            w = 72 if name == "147455" else 44
            p.box(x, y, f"B{name}" if name != "…" else "…", w, 36, "a" if name in ("3", "7", "8") else "free", radius=3)
            x += w
        p.text(x + 14, y + 18, f"{GIB_PER_LAYER} GiB", kind="soft")
    p.table(
        0,
        250,
        [
            ["the drawing's numbers, computed again", ""],
            [
                f"{GIB_PER_LAYER} GiB a layer / {NUM_BLOCKS:,} blocks",
                f"{block_bytes:,} bytes a block and layer, K and V",
            ],
            [
                "/ 16 tokens a block",
                f"{block_bytes // 16} bytes a token and layer: 2 x 256, such as K and V of one KV head of 128 "
                f"in 16 bits",
            ],
            [
                f"x {NUM_LAYERS} layers",
                f"{block_bytes * NUM_LAYERS / 1024:.0f} KiB a block, {GIB_PER_LAYER * NUM_LAYERS:.0f} GiB in all",
            ],
            [
                f"/ {a_request} blocks a request",
                f"8,192 tokens in and 1,024 out: room for {NUM_BLOCKS // a_request} of them",
            ],
        ],
    )
    return p
