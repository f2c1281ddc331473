"""What exercise 06 is graded by. `nanopd grade 06 FILE`, or `pytest` in this folder for exercise.py."""

from contextlib import ExitStack
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.connector.base import KVConnectorWorker
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import KVConnectorOutput, TransferStats
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate


class Store:
    """The store, as both halves see it. `late`: hashes that it does not answer for yet."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Any] = {}
        self.late: set[bytes] = set()

    def lookup(self, block_hash: bytes) -> bool | None:
        return None if block_hash in self.late else block_hash in self.blocks

    def add(self, request: Request, numbers: Any) -> None:
        self.blocks |= {request.block_hashes[i]: True for i in numbers}


def setting(student: ModuleType, num_blocks: int = 40, **options: Any) -> tuple[Store, Scheduler]:
    """A store and a real scheduler with the student's connector; blocks of 4 tokens."""
    store = Store()
    return store, drive.scheduler(num_blocks, connector=student.StoreScheduler(store, 4), **options)


def hashed(scheduler: Scheduler, name: str, prompt: Any, **params: Any) -> Request:
    request = drive.request(name, prompt, **params)
    scheduler.kv.update_block_hashes(request)
    return request


def told(meta: Any) -> dict[str, Any]:
    """The plan for the worker half as plain data."""
    return {
        kind: {i: [[h.hex()[:8], block] for h, block in pairs] for i, pairs in getattr(meta, kind).items()}
        for kind in ("load", "save")
    }


def came(*ids: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving=set(ids))


@case(points=2, hint="A prefix has no hole. And the local hit is not the store's to count.")
def test_matched(student: ModuleType, random: Random) -> Any:
    """It answers with what the store has beyond the local hit, up to the first block that is missing"""
    store, scheduler = setting(student)
    request = hashed(scheduler, "A", 4 * random.randint(8, 10) + random.randint(0, 3))
    hole = random.randint(4, 6)
    store.add(request, [i for i in range(len(request.block_hashes)) if i != hole])
    ask = scheduler.connector.get_num_new_matched_tokens
    answers = {f"{4 * hit} found here": list(ask(request, 4 * hit)) for hit in range(hole + 1)}
    store.add(request, [hole])
    return {"with a hole": answers, "without": list(ask(request, 4)), "asked again": list(ask(request, 4))}


@case(points=2, hint="Only an answer that the result depends on can make it unknown.")
def test_not_known_yet(student: ModuleType, random: Random) -> Any:
    """It says "not known yet" while it depends on a block of which the store has not answered"""
    store, scheduler = setting(student)
    a, b = (hashed(scheduler, name, random.randint(24, 27)) for name in "AB")
    late, missing = random.sample(range(1, 6), 2)
    store.add(a, [i for i in range(6) if i not in (late, missing)])
    store.late = {a.block_hashes[late]}
    scheduler.add_request(a)
    scheduler.add_request(b)
    seen = []
    for _ in range(2):
        plan = drive.step(scheduler)
        queue = [r.request_id for r in scheduler.skipped_waiting]
        seen.append([list(plan.num_scheduled_tokens.items()), queue, told(plan.kv_connector_metadata)])
    store.late.clear()
    plan = drive.step(scheduler)
    return {"first steps": seen, "when it is known": told(plan.kv_connector_metadata)}


@case(points=3, hint="Draw the table: hits, then what is loaded, then the rest. Which entries does the store fill?")
def test_load(student: ModuleType, random: Random) -> Any:
    """Each external block is loaded into its own place in the table, and told once"""
    store, scheduler = setting(student)
    shared = random.sample(range(1000), 4 * random.randint(1, 3))
    scheduler.add_request(drive.request("A", [*shared, 5000], max_tokens=30))
    drive.step(scheduler)
    b = hashed(scheduler, "B", shared + random.sample(range(2000, 3000), random.randint(13, 19)))
    store.add(b, range(len(shared) // 4 + random.randint(2, 3)))
    scheduler.add_request(b)
    first = drive.step(scheduler, transfers=came("B"))
    table = scheduler.kv.get_block_ids("B")
    second = drive.step(scheduler)
    return {
        "first step": told(first.kv_connector_metadata),
        "table": table,
        "second step": told(second.kv_connector_metadata),
        "tokens in it": list(second.num_scheduled_tokens.items()),
    }


@case(
    points=3, hint="Whoever reads the blocks must find them unchanged; and nobody reports what nobody was told to do."
)
def test_save(student: ModuleType, random: Random) -> Any:
    """What the store lacks is saved, and the blocks are held until it is; else they are free at once"""
    store, scheduler = setting(student)
    prompt = random.sample(range(1000), random.randint(17, 23))
    a = hashed(scheduler, "A", prompt, max_tokens=random.randint(1, 6))
    store.add(a, [0] if random.random() < 0.5 else [0, 1])
    store.late = {a.block_hashes[3]}  # the store does not say that it lacks this one
    scheduler.add_request(a)
    drive.step(scheduler, transfers=came("A"))
    while "A" in scheduler.requests:
        drive.step(scheduler)
    seen: dict[str, Any] = {}
    seen["held"] = scheduler.kv.get_block_ids("A (reclaiming)")
    plan = drive.step(scheduler)
    seen["told"] = told(plan.kv_connector_metadata)
    store.late.clear()
    store.add(a, range(len(a.block_hashes)))
    drive.step(scheduler, transfers=KVConnectorOutput(finished_sending={"A"}))
    seen["free after the save"] = scheduler.kv.pool.num_free_blocks
    scheduler.add_request(drive.request("B", prompt, max_tokens=1))
    drive.step(scheduler)
    plan = drive.step(scheduler)
    seen["nothing new to save"] = told(plan.kv_connector_metadata), scheduler.kv.pool.num_free_blocks
    return seen


@case(points=2, hint="Compare the number of tokens in the request with the number that have K and V.")
def test_cut_short(student: ModuleType, random: Random) -> Any:
    """A request that is aborted, loading or running, is not saved; a block half computed neither"""
    store, scheduler = setting(student)
    a, b = (hashed(scheduler, name, random.randint(12, 15), max_tokens=30) for name in "AB")
    c = hashed(scheduler, "C", 8, max_tokens=4)  # 12 tokens when it ends, 11 of them computed
    store.add(a, range(random.randint(1, 3)))
    for request in (a, b, c):
        scheduler.add_request(request)
    drive.step(scheduler)
    scheduler.finish_requests(["A", "B"])
    seen = [[told(drive.step(scheduler).kv_connector_metadata), sorted(scheduler.reclaiming)] for _ in range(5)]
    drive.step(scheduler, transfers=KVConnectorOutput(failed_recving={"A"}, finished_sending={"C"}))
    return {"after the abort": seen, "free at the end": scheduler.kv.pool.num_free_blocks}


@case(points=3, hint="Find the first step that differs; the cases above are parts of this one.")
def test_under_load(student: ModuleType, random: Random) -> Any:
    """200 random steps with a small pool: late answers, failed loads, preemptions, aborts; nothing leaks"""
    store, scheduler = setting(student, num_blocks=14, max_num_batched_tokens=24)
    seen: list[Any] = []
    loading: list[str] = []
    saving: dict[str, list[bytes]] = {}
    number = 0
    for step in range(200):
        if step < 150 and random.random() < 0.4:
            number += 1
            prompt = list(range(4 * random.randint(0, 4))) + [1000 * number + i for i in range(random.randint(1, 9))]
            scheduler.add_request(drive.request(f"r{number}", prompt, max_tokens=random.randint(1, 12)))
        if random.random() < 0.05 and scheduler.requests:
            scheduler.finish_requests([random.choice(list(scheduler.requests))])
        hashes = sorted({h for r in scheduler.requests.values() for h in r.block_hashes})
        store.late = set(random.sample(hashes, len(hashes) // 10)) if step < 150 else set()
        if not scheduler.has_unfinished_requests():
            continue
        plan = scheduler.schedule()
        meta = plan.kv_connector_metadata
        loading += meta.load
        saving |= {i: [h for h, _ in pairs] for i, pairs in meta.save.items()}
        news = KVConnectorOutput()
        for request_id in [i for i in loading if random.random() < 0.5]:
            loading.remove(request_id)
            (news.finished_recving if random.random() < 0.8 else news.failed_recving).add(request_id)
        for request_id in [i for i in saving if random.random() < 0.5]:
            store.blocks |= dict.fromkeys(saving.pop(request_id), True)
            news.finished_sending.add(request_id)
        drive.finish_step(scheduler, plan, transfers=news)
        seen.append([list(plan.num_scheduled_tokens.items()), told(meta)])
    return {"steps": seen, "free at the end": scheduler.kv.pool.num_free_blocks}


class Bounded(Scheduler):
    """A scheduler that does not go on for ever."""

    num_steps = 0

    def schedule(self) -> Any:
        self.num_steps += 1
        assert self.num_steps < 2000, "2,000 steps, and still something is waited for: was it ever told, is it held?"
        return super().schedule()


class StoreWorker(KVConnectorWorker):
    """The worker half: copies the bytes of a block over all layers. A load takes one more step than a save.

    `lost`: hashes that the index has and the store has lost, so that their load fails.
    """

    def __init__(self, store: Store, memory: Any, lost: set[bytes]) -> None:
        self.store, self.memory, self.lost = store, memory, lost  # memory: (layer, 2, block, slot, head, dim)
        self.coming: list[KVConnectorOutput] = []
        self.num_loaded = self.num_failed = 0

    def start_load_kv(self, metadata: Any) -> None:
        saved, loaded = KVConnectorOutput(finished_sending=set(metadata.save)), KVConnectorOutput()
        for pairs in metadata.save.values():
            for block_hash, block_id in pairs:
                self.store.blocks[block_hash] = self.memory[:, :, block_id].clone()
        for request_id, pairs in metadata.load.items():
            if any(block_hash in self.lost for block_hash, _ in pairs):
                self.num_failed += 1
                loaded.failed_recving.add(request_id)
                continue
            for block_hash, block_id in pairs:
                self.memory[:, :, block_id] = self.store.blocks[block_hash]
                self.num_loaded += 1
            loaded.finished_recving.add(request_id)
        self.coming = [*(self.coming or [KVConnectorOutput()]), loaded]
        self.coming[0].add(saved)

    def get_finished(self) -> KVConnectorOutput:
        return self.coming.pop(0)

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        pass


@case(
    points=4, hint="All the cases above are small pieces of this one: find the first of them that fails.", seconds=120
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Real engines share a store: what one has saved another loads, and the tokens are those of an engine without"""
    from nanopd.worker.model_runner import ModelRunner

    store = Store()
    system = [random.randrange(10, 290) for _ in range(32)]
    prompts = [system + [random.randrange(10, 290) for _ in range(random.randint(1, 40))] for _ in range(3)]
    prompts.append([random.randrange(10, 290) for _ in range(48)])
    KVCacheManager(1, 16).update_block_hashes(other := drive.request("other", prompts[-1]))
    lost = {random.choice(other.block_hashes)}

    def engine(lost: set[bytes], num_blocks: int) -> dict[str, Any]:
        """Serves the prompts in a new engine, whose only link to those before it is the store."""
        workers = []

        def scheduler(config: Any, kv: Any, max_model_len: int, *_: Any) -> Scheduler:
            return Bounded(config, kv, max_model_len, student.StoreScheduler(store, kv.block_size))

        def runner(config: Any, model: Any, kv_cache: Any, backend: Any, max_model_len: int, _: None) -> ModelRunner:
            workers.append(StoreWorker(store, kv_cache.memory, lost))
            return ModelRunner(config, model, kv_cache, backend, max_model_len, workers[0])

        with ExitStack() as patches:
            patches.enter_context(patch("nanopd.engine.core.Scheduler", scheduler))
            patches.enter_context(patch("nanopd.engine.core.ModelRunner", runner))
            result = generate(prompts, max_tokens=8, num_blocks=num_blocks, max_num_batched_tokens=48)
        numbers = {"blocks loaded": workers[0].num_loaded, "loads that failed": workers[0].num_failed}
        return result | numbers | {"blocks in the store": len(store.blocks)}

    return {
        "an empty store": engine(set(), num_blocks=64),
        "a full one that lost a block, and a small engine": engine(lost, num_blocks=11),
    }
