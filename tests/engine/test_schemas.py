"""Random JSON schemas, of the kinds that public suites have, and a model with random weights: every output that comes to its
end is valid JSON and fits its schema, as another library sees it. What llguidance cannot do it refuses, and says why."""

import collections
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from nanopd.config import SamplingParams
from nanopd.engine.llm import LLM

jsonschema = pytest.importorskip("jsonschema")

PATTERNS = ["^[A-Z]{2}[0-9]{3}$", "^(red|green|blue)$", "^[a-z]+@[a-z]+\\.com$", "^\\d{4}-\\d{2}$", "^x", "[0-9]+$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "duration"]
REFUSED = [
    {"not": {"type": "null"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
]
REFUSED += [{"type": "string", "pattern": "(?=a)"}, {"type": "strange"}, {"$ref": "#/$defs/missing"}]


class Schemas:
    """Draws schemas. Those under `$defs` may be referred to, by themselves, too."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> dict[str, Any]:
        defs = {
            "leaf": self.leaf(),
            "pair": {"type": "array", "prefixItems": [self.leaf(), self.leaf()], "items": False},
        }
        defs["pair"] |= {"minItems": 2, "maxItems": 2}
        link = {"type": "object", "properties": {"value": self.leaf(), "next": {"$ref": "#/$defs/link"}}}
        defs["link"] = link | {"required": ["value"], "additionalProperties": False}
        return self.object(3) | {"$defs": defs}

    def any(self, depth: int) -> dict[str, Any]:
        if self.rng.random() < 0.01:
            return self.rng.choice(REFUSED)
        if depth <= 0 or self.rng.random() < 0.35:
            return self.leaf()
        if (what := self.rng.randrange(8)) == 0:
            return {"$ref": "#/$defs/" + self.rng.choice(["leaf", "pair", "link"])}
        if what == 1:
            return {"anyOf": [self.any(depth - 1) for _ in range(self.rng.randint(2, 3))]}
        if what == 2:
            return {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": self.rng.randint(1, 500)}]}
        return self.array(depth - 1) if what < 5 else self.object(depth - 1)

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(["id", "name", "tags", "a b", "größe", 'q"uote', "x-y", "n"], self.rng.randint(1, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        schema["required"] = self.rng.sample(names, self.rng.randint(0, len(names)))
        if (more := self.rng.randrange(4)) < 3:
            schema["additionalProperties"] = False if more < 2 else {"type": "integer"}
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        least = self.rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.any(depth),
            "minItems": least,
            "maxItems": least + self.rng.randint(0, 3),
        }

    def leaf(self) -> dict[str, Any]:
        rng = self.rng
        low = rng.randint(-1000, 1000)
        makers: list[Any] = [
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"const": rng.choice([1, "one", None, [1, "x"], {"k": 1.5}])},
            lambda: {"enum": rng.sample([1, 2.5, "a", "b c", 'd"', "ü", None, True], rng.randint(1, 4))},
            lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            lambda: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(5, 50)},
            lambda: {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 999},
            lambda: {"type": "number", "minimum": low / 7, "maximum": low / 7 + rng.random() * 100},
            lambda: {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 12)},
            lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
            lambda: {"type": "string", "format": rng.choice(FORMATS)},
            lambda: {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        ]
        return dict(rng.choice(makers)())


def check(model: Path, count: int, seed: int) -> collections.Counter[str]:
    """Generates from `count` schemas, and counts how that ended."""
    draw, llm = Schemas(seed), LLM(str(model), max_model_len=512, num_blocks=2500, max_num_seqs=64)
    schemas = [draw.draw() for _ in range(count)]
    wishes = [SamplingParams(max_tokens=500, seed=i, structured_outputs={"json": s}) for i, s in enumerate(schemas)]
    ends: collections.Counter[str] = collections.Counter()
    for schema, output in zip(schemas, llm.generate(["{"] * count, wishes)):
        (made,) = output.outputs
        ends[str(made.finish_reason)] += 1
        if made.finish_reason == "error":
            assert re.match(r"structured_outputs: (?!lexer error)\w", str(made.stop_reason)), "the library's reason"
            ends[f"error: {str(made.stop_reason).splitlines()[0][:60]}"] += 1
        elif made.finish_reason == "stop":
            jsonschema.Draft202012Validator.check_schema(schema)
            known = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])  # its time is not RFC 3339's
            checker = jsonschema.Draft202012Validator(schema, format_checker=known)
            checker.validate(json.loads(made.text))
    llm.core.close()
    return ends


def test_random_schemas(tiny_model: Path):
    ends = check(tiny_model, 25, 0)
    assert ends["stop"] >= 10, ends


@pytest.mark.slow
def test_500_random_schemas(tiny_model: Path):
    ends = check(tiny_model, 500, 1)
    print(ends)
    assert ends["stop"] >= 250 and ends["error"] >= 5, ends
