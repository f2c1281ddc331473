"""What exercise 15 is graded by. `nanopd grade 15 FILE`, or `pytest` in this folder for exercise.py."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.serve.router import Node, Router
from nanopd_lessons.cluster import Asked, Cluster, hit_rate, read_trace
from nanopd_lessons.grading import case

NODES = ("A", "B", "C")
TTFT, ITL = 5.0, 0.05  # the SLO, in seconds


def conversation(random: Random, turns: int) -> list[list[int]]:
    """The prompts of a conversation: each begins with all of the one before it."""
    blocks = [random.randrange(10**9) for _ in range(4 * turns)]
    return [blocks[: 4 * (i + 1)] for i in range(turns)]


def play(mine: Any, trace: Sequence[Asked], speed: float, **more: Any) -> tuple[Cluster, dict[str, Any]]:
    """Four nodes behind the real router, which asks `mine`."""

    def choose(router: Router, nodes: list[Node], prompt: list[int]) -> Node | None:
        if not nodes:  # there are no prefill nodes
            return None
        name = mine.choose({node.url: len(node.calls) for node in nodes}, prompt)
        return next((node for node in nodes if node.url == name), None)

    with patch.object(Router, "choose", choose):
        cluster = Cluster("prefix_aware", 4)
        outcomes = cluster.run(trace, speed, **more)
    return cluster, {
        "requests per node": [sum(o.node == cluster.name(node) for o in outcomes) for node in cluster.replicas],
        "hit rate": round(hit_rate(cluster), 6),
        "largest difference in requests in flight": cluster.most_uneven,
        "failed": sum(o.failed for o in outcomes),
        "within the SLO": sum(o.within(TTFT, ITL) for o in outcomes),
    }


@case(
    points=1,
    hint="What use is the third block of a prompt to a node that has lost the second? Lesson 03 has the answer.",
)
def test_matched(student: ModuleType, random: Random) -> Any:
    """Matched blocks are counted from the beginning, up to the first that is missing"""
    mine = student.PrefixRouter(bound=2, most=100)
    blocks = random.sample(range(10**6), 12)
    mine.seen = {"A": dict.fromkeys(blocks[:7]), "B": dict.fromkeys(blocks[:3] + blocks[4:]), "C": {}}
    prompts = {"all": blocks, "its beginning": blocks[:5], "another": [1, *blocks], "none": []}
    return {about: [mine.matched(node, prompt) for node in (*NODES, "new")] for about, prompt in prompts.items()}


@case(
    points=2,
    hint="The block pool gives its blocks back last one first (K6). Which of a prompt's blocks should go first here?",
)
def test_remember(student: ModuleType, random: Random) -> Any:
    """The oldest prompts are forgotten first, and the end of a prompt before its beginning"""
    mine = student.PrefixRouter(bound=2, most=random.randint(14, 18))
    first, second, third = (conversation(random, 2)[-1] for _ in range(3))
    seen = []
    for prompt in (first, second, first[:4], third, second):
        mine.remember("A", prompt)
        seen.append({"order": list(mine.seen["A"]), "matched": [mine.matched("A", p) for p in (first, second, third)]})
    return seen


@case(points=2, hint="Where did the first turn of this conversation go, and who has its blocks?")
def test_affinity(student: ModuleType, random: Random) -> Any:
    """With equal loads each conversation stays with its node"""
    mine = student.PrefixRouter(bound=2, most=1000)
    talks = [conversation(random, 4) for _ in range(6)]
    where: list[list[str]] = [[] for _ in talks]
    for turn in range(4):
        for i in random.sample(range(6), 6):
            begun = {node: sum(went[:1] == [node] for went in where) for node in NODES}
            where[i].append(mine.choose(begun if turn == 0 else dict.fromkeys(NODES, 2), talks[i][turn]))
    return {f"conversation {i}": went for i, went in enumerate(where)}


@case(points=2, hint="Which nodes may be chosen at all? Look for the least loaded one first; then for the prefix.")
def test_bound(student: ModuleType, random: Random) -> Any:
    """A node that is too far ahead loses even a prompt that it has; one at the bound does not"""
    bound = random.randint(1, 5)
    mine = student.PrefixRouter(bound, most=1000)
    prompt = conversation(random, 3)
    seen = [mine.choose({"A": 0, "B": 0, "C": 0}, prompt[0])]
    least = random.randint(0, 9)
    for more in (bound, bound + 1, bound + 2):
        seen.append(mine.choose({"A": least + more, "B": least + 1, "C": least}, prompt[1]))
    seen.append(mine.choose({"A": least, "B": least, "C": least + bound}, prompt[2]))
    return {"chosen": seen, "matched": [mine.matched(node, prompt[2]) for node in NODES]}


@case(points=2, hint="What is in the cache of a process that has just been started?")
def test_a_node_is_down(student: ModuleType, random: Random) -> Any:
    """A node that is down is not chosen, and comes back as one that has nothing"""
    mine = student.PrefixRouter(bound=3, most=1000)
    talk, other = conversation(random, 3), conversation(random, 1)[0]
    down = mine.choose({"A": 1, "B": random.randint(0, 1), "C": 2}, talk[0])
    up = {node: random.randint(0, 2) for node in NODES if node != down}
    seen = [down, mine.choose(up, other), mine.choose(dict.fromkeys(NODES, 0), talk[1])]
    return {"chosen": [*seen, mine.choose({}, talk[2]), mine.choose(dict.fromkeys(NODES, 1), talk[2])]}


@case(points=3, hint="Print `in_flight` at each choice. If one node has it all, what did the bound do?", seconds=60)
def test_hot_prefix(student: ModuleType, random: Random) -> Any:
    """Everybody asks about one document: it spreads over real nodes as far as the load asks for"""
    document = list(range(16))
    trace = [
        Asked(f"r{i}", i * 0.05, 16 * 512 + 300, random.randint(40, 120), [*document, 1000 + i]) for i in range(60)
    ]
    cluster, result = play(student.PrefixRouter(bound=4, most=512), trace, speed=1.0)
    copies = sum(replica.holds(trace[0]) >= 16 for replica in cluster.replicas.values())
    return result | {"nodes with the document": copies}


@case(points=3, hint="A dead node's requests are sent again, and `choose` no longer gets that node.", seconds=60)
def test_a_real_node_dies(student: ModuleType, random: Random) -> Any:
    """Conversations over four real nodes, one of which dies and comes back"""
    talks = [conversation(random, 5) for _ in range(10)]
    asked = [(turn * 3 + random.random(), talk[turn]) for talk in talks for turn in range(5)]
    trace = [
        Asked(f"r{i}", at, 512 * len(blocks) + 1, random.randint(20, 60), [*blocks, 10**9 + i])
        for i, (at, blocks) in enumerate(sorted(asked))
    ]
    mine = student.PrefixRouter(bound=4, most=512)
    return play(mine, trace, speed=1.0, failures=[(random.uniform(4, 7), random.randrange(4), 3.0)])[1]


@case(points=4, hint="`nanopd lesson run 15` shows what the others reach. Compare hit rates first.", seconds=120)
def test_goodput(student: ModuleType, random: Random) -> Any:
    """On a random slice of a real trace your goodput is at least that of the policies that look at no prefix"""
    start = random.randrange(100)
    trace = read_trace(Path(__file__).parent / "documents.jsonl")[start : start + 90]
    _, mine = play(student.PrefixRouter(bound=4, most=512), trace, speed=0.7)
    naive = {}
    for policy in ("round_robin", "least_loaded"):
        naive[policy] = sum(o.within(TTFT, ITL) for o in Cluster(policy, 4).run(trace, 0.7))
    return {"yours": mine, "at least theirs": mine["within the SLO"] >= max(naive.values()), "theirs": naive}
