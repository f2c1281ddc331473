"""What exercise 10 is graded by. `nanopd grade 10 FILE`, or `pytest` in this folder for exercise.py."""

import tempfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.config import SamplingParams
from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate

assert generate  # runs the real engine: the grader loads torch once for all cases
WORDS = (" the", "€ and", "STOP it", "\n\nHuman:", " 👍👍")
LETTERS = "aeiou STOP\n€é日本👍"


def model_with_text() -> Path:
    """A tiny model whose tokens are bytes, and a few whole words."""
    return drive.byte_tokenizer(drive.tiny_model(Path(tempfile.mkdtemp()) / "tiny"), WORDS)


def byte_tokenizer() -> Any:
    from nanopd.models.tokenizer import load_tokenizer

    return load_tokenizer(drive.byte_tokenizer(Path(tempfile.mkdtemp()), WORDS))


def some_logits(random: Random, n: int = 12) -> list[float]:
    return [random.gauss(0, 2) for _ in range(n)]


def some_text(random: Random, n: int = 30) -> str:
    return "".join(random.choice(LETTERS) for _ in range(n))


def kept(student: ModuleType, logits: list[float], **params: Any) -> list[list[float]]:
    return [[token, share] for token, share in student.keep(logits, SamplingParams(**params))]


@case(
    points=1,
    hint="exp(1000) is too much for a float, but softmax does not change when all logits move by the same amount.",
)
def test_temperature(student: ModuleType, random: Random) -> Any:
    """Probabilities at several temperatures, best first, of large logits too"""
    logits = some_logits(random)
    ties = [random.choice((0.5, 1.5)) for _ in range(8)]
    return {
        "by temperature": [kept(student, logits, temperature=t) for t in (0.3, 1.0, random.uniform(1.5, 3))],
        "equal ones": kept(student, ties),
        "large ones": kept(student, [1000 + x for x in logits]),
        "forbidden ones": kept(student, [float("-inf") if i % 3 else x for i, x in enumerate(logits)]),
    }


@case(
    points=3,
    hint="Take probabilities 0.4, 0.3, 0.2, 0.1 with top_k=2 and top_p=0.5. How much do the first two have after top-k?",
)
def test_cuts(student: ModuleType, random: Random) -> Any:
    """Each cut alone, and all together"""
    found = {}
    for i in range(8):
        logits = some_logits(random)
        top_k, top_p, min_p = random.randint(1, 8), random.uniform(0.3, 0.95), random.uniform(0.02, 0.6)
        cuts = {"top_k": {"top_k": top_k}, "top_p": {"top_p": top_p}, "min_p": {"min_p": min_p}}
        cuts["all"] = cuts["top_k"] | cuts["top_p"] | cuts["min_p"]
        cuts["k and p"] = cuts["top_k"] | cuts["top_p"]
        found[f"round {i}"] = {name: kept(student, logits, temperature=1.3, **cut) for name, cut in cuts.items()}
    found["hardly anything"] = {"top_p": kept(student, some_logits(random), top_p=1e-6)}
    found["more than there are"] = {"top_k": kept(student, some_logits(random), top_k=1000)}
    found["minus one"] = {"top_k": kept(student, some_logits(random), top_k=-1)}
    return found


@case(points=2, hint="Draw the stretch from 0 to 1 on paper. Where does each part begin, and whose is the border?")
def test_draw(student: ModuleType, random: Random) -> Any:
    """A number gives a token, at the borders and beyond the last one too"""
    parts = [(7, 0.5), (3, 0.25), (9, 0.125), (1, 0.125)]
    numbers = [0.0, 0.499, 0.5, 0.75, 0.874, 0.875, 0.999999]
    short = [(i, 0.1 - 1e-9) for i in random.sample(range(100), 10)]
    return {
        "at the borders": [student.draw(parts, u) for u in numbers],
        "at random": [student.draw(parts, random.random()) for _ in range(30)],
        "of parts that are a little short": student.draw(short, 1 - 2**-53),
        "of one": student.draw([(42, 1.0)], random.random()),
    }


@case(
    points=3,
    hint="All cases above are pieces of this one. Does anything in your code depend on an earlier draw?",
    seconds=60,
)
def test_real_draws(student: ModuleType, random: Random) -> Any:
    """Your draws in the real engine: the seed alone decides, in a crowd and through preemptions"""
    import torch

    from nanopd.config import EngineConfig
    from nanopd.engine.core import EngineCore
    from nanopd.request import Request
    from nanopd.worker.sampler import uniform

    def drawn(logits: Any, rows: Any, truncate: bool) -> Any:
        pairs = zip(logits.tolist(), rows)
        numbers = [uniform(r.params.seed, r.num_output_tokens) for r in rows]
        tokens = [student.draw(student.keep(x, r.params), u) for (x, r), u in zip(pairs, numbers)]
        return torch.tensor(tokens)

    directory = drive.tiny_model(Path(tempfile.mkdtemp()) / "tiny")
    prompts = [[random.randrange(10, 290) for _ in range(20)] for _ in range(4)]
    cuts: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "top_p": 0.9}]
    seeds, found = [random.randrange(1000) for _ in cuts], {}
    for name, num_blocks in (("with room", 64), ("without", 6)):
        core = EngineCore(
            EngineConfig(model=str(directory), num_blocks=num_blocks, max_model_len=64, attention_backend="cpu")
        )
        for i, (prompt, cut, seed) in enumerate(zip(prompts, cuts, seeds)):
            wish = SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True, **cut)
            core.add_request(Request(str(i), prompt, wish))
        tokens: dict[str, list[int]] = {}
        with patch("nanopd.worker.sampler._draw", drawn):
            while core.has_unfinished_requests():
                for news in core.step():
                    tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
        found[name] = {"tokens": tokens, "preemptions": core.scheduler.stats().num_preemptions}
    return found


def told(student: ModuleType, tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = (), end: bool = True) -> Any:
    """What is shown after each token, and what is said."""
    detokenizer = student.Detokenizer(tokenizer, [1, 2], SamplingParams(stop=stop, max_tokens=1000))
    seen = []
    for i, token in enumerate(tokens):
        said = detokenizer.append([token], finished=end and i == len(tokens) - 1)
        seen.append([detokenizer.text, said])
        if said:
            break
    return seen


@case(
    points=2,
    hint="`tokenizer.decode` of the first two bytes of a euro sign: what does it end in? What must the client not see?",
)
def test_characters(student: ModuleType, random: Random) -> Any:
    """A character is shown when it is whole; the end shows what there is"""
    tokenizer, text = byte_tokenizer(), some_text(random)
    tokens = tokenizer.encode(text)
    mixed = [
        t for letter in text for t in random.choice((tokenizer.encode(letter), [256 + random.randrange(len(WORDS))]))
    ]
    several = student.Detokenizer(tokenizer, [], SamplingParams())
    halves = [(several.append(tokens[i : i + 4]), several.text)[1] for i in range(0, len(tokens), 4)]
    return {
        "byte by byte": told(student, tokenizer, tokens),
        "with words": told(student, tokenizer, mixed),
        "four at a time": halves,
        "with an end token in between": told(student, tokenizer, [*tokens[:5], 299, *tokens[5:]]),
        "cut short": told(student, tokenizer, [*tokenizer.encode("ab€")[:-1]]),
    }


@case(points=1, hint="Bytes that never become a character: for how long does the client wait?")
def test_bytes_that_are_no_text(student: ModuleType, random: Random) -> Any:
    """After more than four tokens nothing is waited for"""
    tokenizer, n = byte_tokenizer(), random.randint(5, 12)
    tokens = [*tokenizer.encode("ab"), *[0xFF] * n, *tokenizer.encode("cd")]
    return {"shown": told(student, tokenizer, tokens)}


@case(
    points=3,
    hint="Which ends of the text are beginnings of a stop string? The longest counts, and it may turn out to be none.",
)
def test_stop_strings(student: ModuleType, random: Random) -> Any:
    """Nothing of a stop string is shown, everything else is, and the first one counts"""
    tokenizer, letters = byte_tokenizer(), random.sample("abcdefgh", 3)
    x, y, z = letters
    stop = (x + x + y, z + x + z + y)
    found: dict[str, Any] = {}
    for i in range(6):
        text = "".join(random.choice(letters) for _ in range(24))
        found[f"text {i}"] = told(student, tokenizer, tokenizer.encode(text), stop)
    found["repeats itself"] = told(student, tokenizer, tokenizer.encode("." + x * 5 + y + "."), (x + x + y,))
    found["almost at the end"] = told(student, tokenizer, tokenizer.encode("." + x + x), stop)
    found["inside a token"] = told(student, tokenizer, [*tokenizer.encode("a "), 258, 65], ("OP",))
    found["two in a token"] = told(student, tokenizer, [*tokenizer.encode("a "), 259, 65], ("man", "\n\nH"))
    found["after half a character"] = told(student, tokenizer, tokenizer.encode("a€b€€c"), ("€€",))
    found["at once"] = told(student, tokenizer, [258, 65], ("STOP",))
    return found


@case(points=1, hint="Count what you decode in a call when a thousand tokens have come already.")
def test_effort(student: ModuleType, random: Random) -> Any:
    """A long answer costs no more per token than a short one"""
    tokenizer, decoded = byte_tokenizer(), []

    class Counting:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return str(tokenizer.decode(ids, skip_special_tokens))

    tokens = tokenizer.encode(some_text(random, 300))
    seen = told(student, Counting(), tokens, ("never there",))
    return {"the text": seen[-1], "most tokens decoded in a call, at most 5": max(decoded) <= 5, "any": bool(decoded)}


@case(
    points=3,
    hint="The front end asks for `text` after each step, and sends what is new. Compare with test_stop_strings.",
    seconds=60,
)
def test_real_stream(student: ModuleType, random: Random) -> Any:
    """Several answers in the real engine, each a stream of chunks as the server would send them"""
    from nanopd.engine.llm import LLM
    from nanopd.serve.api import Answer, Body

    path = model_with_text()
    texts = [
        some_text(random, random.randint(10, 20)) + random.choice(("STOP", "\n\nHuman", "👍")) + "x" * 9
        for _ in range(4)
    ]
    found: dict[str, Any] = {}
    with patch("nanopd.engine.llm.Detokenizer", student.Detokenizer):
        llm = LLM(model=str(path), num_blocks=12, max_model_len=150, attention_backend="cpu")
        script = {i: llm.tokenizer.encode(text) for i, text in enumerate(texts)}

        def scripted(logits: Any, rows: Any) -> Any:
            """In place of the sampler: the model says what we want."""
            return [script[int(row.token_ids[0])][row.num_output_tokens] for row in rows], [None] * len(rows)

        answers = []
        for i in script:
            answers.append(Answer(str(i), "tiny", False, Body(prompt="", stream=True), None))
            wish = SamplingParams(max_tokens=len(script[i]), stop=("STOP", "\n\nHu"), ignore_eos=True)
            answers[i].add(llm.add_request([i, 1, 2], wish))
        with patch("nanopd.worker.model_runner.sample", scripted):
            while llm.has_unfinished_requests():
                llm.step()
                for i, answer in enumerate(answers):
                    for choice in answer.news()["choices"]:
                        facts = [choice["text"], choice["finish_reason"], choice["stop_reason"]]
                        found.setdefault(f"answer {i}", []).append(facts)
    left = list(llm.core.scheduler.requests)
    return found | {"left in the core": left}
