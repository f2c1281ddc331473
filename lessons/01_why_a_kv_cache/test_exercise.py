"""What exercise 01 is graded by. `nanopd grade 01 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd_lessons.grading import case, generate, model


def sizes_of(student: ModuleType, config: Any) -> Any:
    """The student's Sizes of a model."""
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return student.Sizes(**{name: getattr(config, name) for name in names})


def some_sizes(student: ModuleType, random: Random) -> Any:
    """A decoder whose sizes all differ, so that no two can be mixed up."""
    kv_heads, group = random.randint(2, 8), random.randint(2, 8)
    return student.Sizes(
        num_layers=random.randint(3, 60),
        hidden_size=random.choice((960, 2048, 4096)),
        intermediate_size=random.choice((2560, 5632, 11008)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=random.choice((64, 80, 128)),
        vocab_size=random.randint(30_000, 150_000),
    )


def some_step(student: ModuleType, random: Random, kinds: str = "prefill decode chunk") -> list[Any]:
    step = []
    for kind in random.choices(kinds.split(), k=random.randint(2, 6)):
        computed = 0 if kind == "prefill" else random.randint(1, 3000)
        step.append(student.Work(computed, 1 if kind == "decode" else random.randint(2, 900), kind != "chunk"))
    return step


def some_machine(student: ModuleType, random: Random) -> Any:
    return student.Machine(random.uniform(1e11, 1e15), random.uniform(1e10, 5e12))


@case(
    points=2,
    hint="Draw one layer: seven matrices. Which of them are as wide as the query heads, which as the KV heads?",
)
def test_weights_and_kv(student: ModuleType, random: Random) -> Any:
    """Weights of the layers, and bytes of K and V for a token"""
    sizes = [some_sizes(student, random) for _ in range(4)]
    return {
        "weights": [student.layer_weights(s) for s in sizes],
        "KV bytes in 2-byte numbers": [student.kv_bytes_per_token(s, 2) for s in sizes],
        "in 4-byte numbers": [student.kv_bytes_per_token(s, 4) for s in sizes],
    }


@case(
    points=1,
    hint="Build the decoder on the device `meta` and count what it really has. What is in there that you left out?",
)
def test_the_real_decoder(student: ModuleType, random: Random) -> Any:
    """They agree with the real Decoder and the real KV cache"""
    import torch

    from nanopd.models.decoder import Decoder
    from nanopd.models.loader import load_config
    from nanopd.worker.kv_memory import bytes_per_block

    config = load_config(model())
    with torch.device("meta"):
        decoder = Decoder(config, 16)
    matrices = sum(p.numel() for p in decoder.layers.parameters() if p.dim() == 2)
    sizes, block_size = sizes_of(student, config), random.choice((8, 16, 32))
    return {
        "weights too many": student.layer_weights(sizes) - matrices,
        "bytes of a block too many": student.kv_bytes_per_token(sizes, 2) * block_size
        - bytes_per_block(config, block_size, torch.bfloat16),
    }


@case(
    points=3,
    hint="For a chunk of 3 tokens on top of 10: what does each of the three see? And whose logits are computed?",
)
def test_flops(student: ModuleType, random: Random) -> Any:
    """FLOPs of decodes, of prefills, of chunks, and of all in one step"""
    sizes = some_sizes(student, random)
    found = {kind: student.flops(sizes, some_step(student, random, kind)) for kind in ("decode", "prefill", "chunk")}
    return found | {"mixed": student.flops(sizes, some_step(student, random)), "nothing": student.flops(sizes, [])}


@case(points=2, hint="What is read once for the whole batch, and what once for each request? And who needs the head?")
def test_bytes(student: ModuleType, random: Random) -> Any:
    """Bytes of decodes, of prefills, of chunks, and of all in one step"""
    sizes = some_sizes(student, random)
    found = {
        kind: student.bytes_moved(sizes, some_step(student, random, kind), 2) for kind in ("decode", "prefill", "chunk")
    }
    return found | {"mixed, 4 bytes": student.bytes_moved(sizes, some_step(student, random), 4)}


@case(points=2, hint="Two things take time, and they overlap perfectly. When is the step over?")
def test_seconds(student: ModuleType, random: Random) -> Any:
    """The roofline's time, on either side of the ridge"""
    sizes, found = some_sizes(student, random), []
    for kind in ("decode", "prefill", "prefill decode chunk") * 3:
        step, machine = some_step(student, random, kind), some_machine(student, random)
        found.append(1e6 * student.seconds(sizes, step, 2, machine))
    return {"microseconds": found}


@case(
    points=3,
    hint="Each request more brings FLOPs *and* bytes. Which of the two has to win, and by how much must it catch up?",
)
def test_ridge_batch(student: ModuleType, random: Random) -> Any:
    """The batch at which decoding is no longer bound by memory, if there is one"""
    found = []
    for _ in range(6):
        sizes, machine = (
            some_sizes(student, random),
            student.Machine(random.uniform(5e13, 2e14), random.uniform(1e12, 4e12)),
        )
        for context in (0, random.randint(50, 400), random.randint(5_000, 50_000)):
            batch = student.ridge_batch(sizes, context, 2, machine)
            found.append({"context": context, "batch": batch})
    slow = student.Machine(1e9, 1e12)
    return {
        "batches": found,
        "a machine that hardly computes": student.ridge_batch(some_sizes(student, random), 10, 2, slow),
    }


@case(
    points=4,
    hint="Print the plan of the first step where the numbers differ: a prefill, a decode, a chunk that samples nothing?",
    seconds=60,
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Every step of the real engine costs what the model says: its matrix products are counted while it runs"""
    from torch import nn
    from torch.nn.modules.module import register_module_forward_hook

    from nanopd.models.loader import load_config
    from nanopd.worker.model_runner import ModelRunner

    config = load_config(model())
    sizes, steps, products = sizes_of(student, config), [], []
    execute = ModelRunner.execute_model

    def matrix(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            products.append(2 * inputs[0].numel() * module.out_features)

    def counted(runner: Any, plan: Any) -> Any:
        products.clear()
        computed = {
            r.request_id: r.num_computed_tokens for r in [*plan.scheduled_new_reqs, *plan.scheduled_cached_reqs]
        }
        output = execute(runner, plan)
        planned = plan.num_scheduled_tokens.items()
        work = [student.Work(computed[i], n, i in output.sampled_token_ids) for i, n in planned]
        pairs = sum(w.num_computed + i + 1 for w in work for i in range(w.num_new))
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
        steps.append(
            {
                "tokens": [n for _, n in planned],
                "FLOPs too many": student.flops(sizes, work) - sum(products) - attention,
                "bytes": student.bytes_moved(sizes, work, 4),
            }
        )
        return output

    prompts = [[random.randrange(10, 290) for _ in range(random.randint(5, 60))] for _ in range(4)]
    hook = register_module_forward_hook(matrix)
    try:
        with patch.object(ModelRunner, "execute_model", counted):
            tokens = generate(prompts, max_tokens=6, max_num_batched_tokens=48, attention_backend="cpu")
    finally:
        hook.remove()
    return {"steps": steps, "tokens": tokens}
