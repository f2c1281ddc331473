"""Three layouts of one KV memory, from the strides of real tensors: which runs of memory a block is."""

import torch

from diagrams.drawing import Picture
from nanopd.config import LAYOUTS
from nanopd.models.config import ModelConfig
from nanopd.worker.kv_memory import KVCache

LAYERS, BLOCKS, CHOSEN = 2, 4, 1
SHAPES = {
    "kv_first": "layer i: `(2, num_blocks, block_size, num_kv_heads, head_dim)`",
    "blocks_first": "layer i: `(num_blocks, 2, block_size, num_kv_heads, head_dim)`",
    "cross_layer": "`(num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)`",
}
GOOD_FOR = {
    "kv_first": "what a kernel likes: all keys of a layer side by side; the default of a single node",
    "blocks_first": "keys and values of a block side by side",
    "cross_layer": "what a transfer likes: a block of all layers in one run; the default for P/D",
}


def model(layers: int = LAYERS) -> ModelConfig:
    """A model of the Llama family with few layers."""
    sizes = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": layers, "num_attention_heads": 3}
    rest = {"num_key_value_heads": 3, "vocab_size": 300, "max_position_embeddings": 512}
    return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | sizes | rest)


def memory_order(layout: str, layers: int = LAYERS) -> list[tuple[int, int, int]]:
    """(layer, 0 for K or 1 for V, block) of each piece of the memory, in the order of their addresses."""
    cache = KVCache.allocate(model(layers), BLOCKS, 16, layout, torch.float32, "cpu")
    places = {}
    for layer, halves in enumerate(cache.layers):
        for kv, half in enumerate(halves):
            for block in range(BLOCKS):
                places[half[block].data_ptr()] = (layer, kv, block)
    return [places[address] for address in sorted(places)]


def runs_of(order: list[tuple[int, int, int]], block: int) -> list[tuple[int, int]]:
    """Where the block's contiguous runs start and end."""
    mine = [i for i, piece in enumerate(order) if piece[2] == block]
    starts = [i for i in mine if i - 1 not in mine]
    ends = [i + 1 for i in mine if i + 1 not in mine]
    return list(zip(starts, ends))


def draw() -> Picture:
    """Addresses go from left to right."""
    p = Picture(
        "One KV memory, three layouts",
        "A memory of 2 layers and 4 blocks in the three layouts, in the order of its addresses; block 1 is four "
        "runs, two, or one.",
        "real strides of nanopd/worker/kv_memory.py",
    )
    w = 56
    for n, layout in enumerate(LAYOUTS):
        y = n * 180
        order = memory_order(layout)
        end = p.text(0, y, f"`{layout}`", bold=True).x1
        p.text(end + 16, y, SHAPES[layout], kind="soft")
        p.cells(0, y + 22, [(f"{'KV'[kv]} B{b}", "a" if b == CHOSEN else "plain") for _, kv, b in order], w, 36)
        start = 0
        for i in range(len(order) + 1):
            if i == len(order) or order[i][0] != order[start][0]:
                p.text((start + i) * w / 2, y + 74, f"layer {order[start][0]}", "middle", "soft")
                if start:
                    p.fill(start * w - 1, y + 60, 2, 22, "plain", 0)
                start = i
        runs = runs_of(order, CHOSEN)
        for first, last in runs:
            p.bracket(first * w + 4, last * w - 4, y + 96, "run", kind="a-line")
        p.text(16 * w, y, f"block {CHOSEN}: {len(runs)} run{'s' * (len(runs) > 1)}", "end", bold=True)
        p.text(16 * w, y + 130, GOOD_FOR[layout], "end", "soft")
    of_default = [len(runs_of(memory_order(layout, 30), CHOSEN)) for layout in LAYOUTS]
    p.text(
        0,
        3 * 180 - 6,
        "Each run is a piece of a transfer, and each piece costs some 40 µs however small it is. With the "
        "default model (30 layers)\n"
        f"a block is {of_default[0]} runs in `kv_first`, {of_default[1]} in `blocks_first`, {of_default[2]} in "
        f"`cross_layer`; neighbouring blocks make longer runs.",
        kind="soft",
    )
    return p
