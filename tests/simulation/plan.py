"""What a seed means: the cluster, its requests, and the faults it will meet.

Owns every draw that is made before the simulation begins. Each part has its own random
source, so that leaving a fault out changes nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from baton.v1 import common_pb2
from tests.fakes import VOCAB
from tests.router.tiny_text import MAX_MODEL_LEN
from tests.simulation.fault_plan import FAULT_PHASE_S, Fault, WorkerPlan, draw_faults
from tests.simulation.routing import NAMES, RoutingPlan, draw_routing, with_callers

KV_SHAPE = (2, 2, 2, 4)  # layers, keys and values, kv heads, head dim
# With the longest answer it fits the smallest cache and the model.
LONGEST_PROMPT = 40
# Of all sequences; tests/router/tiny_text.py's.
LONGEST = MAX_MODEL_LEN
NUM_PROBES = 5
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One request. Times in virtual seconds; patience_s: pause of a slow reader between two reads.

    ttft_objective_ms: it is to be refused where that cannot be met; None for whatever the router aims at.
    """

    request_id: str
    at: float
    router: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    deadline_s: float | None
    cancel_after_s: float | None
    patience_s: float
    tenant: str = ""
    priority: int = common_pb2.PRIORITY_NORMAL
    ttft_objective_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a seed stands for.

    fault_phase_s: from the start until everything is healed.
    original_length: tokens up to which the model's positions keep their first scale.
    """

    seed: int
    fault_phase_s: float
    routers: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    lease_ttl_s: float
    stall_timeout_s: float
    max_frame_bytes: int
    kv_window_bytes: int
    max_queue: int
    max_attempts: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    slot_bytes: int = 4096
    max_slots_per_write: int = 16
    retire_s: float = 60.0
    carrier_delay_s: float = 0.0
    carrier_failures: float = 0.0
    routing: RoutingPlan = field(default_factory=RoutingPlan)
    original_length: int = LONGEST

    @property
    def rope_steps(self) -> tuple[int, ...]:
        """Lengths up to which each scale serves; () if there is one."""
        lengths = [self.original_length]
        while lengths[-1] < LONGEST:
            lengths.append(min(2 * lengths[-1], LONGEST))
        return tuple(lengths) if len(lengths) > 1 else ()

    def without(self, index: int) -> Plan:
        """The same plan with one fault left out."""
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


def draw(seed: int, num_requests: int | None = None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed}/cluster")
    routers = tuple(f"router-{index}" for index in range(rng.choice((1, 1, 2))))
    # Prompts press on slow decode workers that are always full, and many are cancelled during a step:
    # blocks that it still writes to are wanted by others at once.
    is_crowded = rng.random() < 0.25
    workers = tuple(
        _worker(role, index, is_crowded, rng)
        for role in ("prefill", "decode")
        for index in range(rng.choice((1, 2, 2, 3)))
    )
    workers = _with_memory(seed, workers)
    slots = random.Random(f"{seed}/slots")
    routing = draw_routing(seed)
    # Below the 2 s after which a silent session ends, only the lease itself can tell that its router is gone.
    lease_ttl_s = rng.choice((1.4, 1.4, 2.5, 5.0))
    return Plan(
        seed=seed,
        fault_phase_s=FAULT_PHASE_S,
        routers=routers,
        workers=workers,
        lease_ttl_s=lease_ttl_s,
        stall_timeout_s=rng.choice((1.5, 3.0)),
        max_frame_bytes=rng.choice((300, 1000, 4000)),
        kv_window_bytes=rng.choice((300, 1000, 64_000)),
        max_queue=rng.choice((4, 64, 64)),
        max_attempts=rng.choice((3, 6)),
        requests=with_callers(seed, routing, _requests(seed, routers, is_crowded, num_requests)),
        faults=draw_faults(seed, routers, workers, lease_ttl_s),
        slot_bytes=slots.choice((4096, 4096, 4096, 512)),
        max_slots_per_write=slots.choice((1, 4, 16)),
        retire_s=slots.choice((4.0, 60.0)),
        carrier_delay_s=slots.choice((0.0, 0.0, 0.05, 0.2, 0.5)),
        carrier_failures=slots.choice((0.0, 0.0, 0.05)),
        routing=routing,
        original_length=_original_length(seed),
    )


def _original_length(seed: int) -> int:
    rng = random.Random(f"{seed}/scale")
    return rng.choice((10, 16, 24)) if rng.random() < 0.15 else LONGEST


def _worker(role: str, index: int, is_crowded: bool, rng: random.Random) -> WorkerPlan:
    block_size = rng.choice((2, 3, 4, 8))
    # Room for one to four of the largest requests.
    num_tokens, step_s = rng.choice((66, 120, 240)), rng.choice((0.03, 0.1, 0.3))
    if is_crowded:
        num_tokens, step_s = (240, 0.03) if role == "prefill" else (100, 1.0)
    return WorkerPlan(
        name=f"{role}-{index}",
        role=role,
        num_blocks=-(-num_tokens // block_size),
        block_size=block_size,
        layout=rng.choice(("HND", "NHD")),
        dtype=rng.choice(DTYPES),
        step_s=step_s,
        credit_tokens=rng.choice((60, 120, 400)),
    )


def _with_memory(seed: int, workers: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """Which workers share a host, how many slots there are, and a prefill worker that nobody takes KV of."""
    rng = random.Random(f"{seed}/memory")
    num_slots, num_hosts = rng.choice((0, 2, 6, 24)), rng.choice((1, 1, 2))
    placed = [
        replace(
            worker,
            host=f"host-{rng.randrange(num_hosts)}",
            num_slots=num_slots if worker.role == "decode" else 0,
        )
        for worker in workers
    ]
    num_prefill = sum(worker.role == "prefill" for worker in workers)
    if num_prefill > 1 and rng.random() < 0.1:
        placed[num_prefill - 1] = replace(placed[num_prefill - 1], has_digests=False)
    return tuple(placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manners:
    """How the clients of one seed behave: shares of all requests; cancelled_after_s: a mean."""

    routers: tuple[str, ...]
    stems: tuple[tuple[int, ...], ...]
    is_bursty: bool
    cancelled: float
    cancelled_after_s: float
    slow: float
    deadline: float


def _requests(
    seed: int, routers: tuple[str, ...], is_crowded: bool, num_requests: int | None
) -> tuple[RequestPlan, ...]:
    rng = random.Random(f"{seed}/requests")
    count = num_requests or rng.randint(50, 70)
    manners = _Manners(
        routers=routers,
        # What prompts begin with, so that caches find something.
        stems=tuple(_tokens(rng.randint(4, 24), rng) for _ in range(2)),
        is_bursty=rng.random() < 0.3,
        cancelled=0.6 if is_crowded else rng.choice((0.0, 0.15, 0.3)),
        cancelled_after_s=2.5 if is_crowded else 0.8,
        slow=rng.choice((0.0, 0.0, 0.1)),
        deadline=rng.choice((0.0, 0.1, 0.3)),
    )
    return tuple(_request(index, manners, rng) for index in range(count))


def _request(index: int, manners: _Manners, rng: random.Random) -> RequestPlan:
    num_prompt = rng.choice((rng.randint(1, 8), rng.randint(4, LONGEST_PROMPT)))
    stem = rng.choice(manners.stems) if rng.random() < 0.4 else ()
    num_output = rng.choice((rng.randint(2, 8), rng.randint(8, 22)))
    at = rng.uniform(1.0, FAULT_PHASE_S - 1)
    if manners.is_bursty:
        at = 1 + at // 8 * 8 + rng.uniform(0, 0.5)
    return RequestPlan(
        request_id=f"r{index}",
        at=at,
        router=rng.choice(manners.routers),
        prompt=(stem + _tokens(num_prompt, rng))[:LONGEST_PROMPT],
        max_tokens=1 if rng.random() < 0.05 else num_output,
        seed=rng.getrandbits(64),
        stop_token_ids=(rng.randrange(2, VOCAB),) if rng.random() < 0.3 else (),
        deadline_s=rng.uniform(0.05, 4.0) if rng.random() < manners.deadline else None,
        cancel_after_s=rng.expovariate(1 / manners.cancelled_after_s)
        if rng.random() < manners.cancelled
        else None,
        patience_s=rng.uniform(0.1, 1.0) if rng.random() < manners.slow else 0.0,
    )


def _tokens(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(count))


def probe(plan: Plan, index: int, at: float) -> RequestPlan:
    """One of the requests that show that a healed cluster works.

    Those of odd number are cancelled; the last one wants its first token sooner than it can be.
    """
    rng = random.Random(f"{plan.seed}/probe/{index}")
    return RequestPlan(
        request_id=f"probe{index}",
        at=at,
        router=plan.routers[index // 2 % len(plan.routers)],
        prompt=_tokens(rng.randint(1, 30), rng),
        max_tokens=30 if index % 2 else rng.randint(4, 8),
        seed=index,
        stop_token_ids=(),
        deadline_s=None,
        cancel_after_s=rng.uniform(0.1, 1.0) if index % 2 else None,
        patience_s=0.0,
        tenant=NAMES[0] if plan.routing.weights else "",
        ttft_objective_ms=0.001 if index == NUM_PROBES - 1 else None,
    )


def rolling(seed: int) -> Plan:
    """A plan without a fault, in which every node is restarted in turn while requests come."""
    rng = random.Random(f"{seed}/rolling")
    plan = draw(seed)
    routers = ("router-0", "router-1")
    workers = tuple(
        replace(_worker(role, index, False, rng), step_s=rng.choice((0.03, 0.1)), credit_tokens=400)
        for role in ("prefill", "decode")
        for index in range(2)
    )
    names = [*routers, *(worker.name for worker in workers)]
    rng.shuffle(names)
    requests = tuple(
        replace(
            request,
            router=rng.choice(routers),
            deadline_s=None,
            cancel_after_s=None,
            patience_s=0.0,
            ttft_objective_ms=None,
        )
        for request in plan.requests
    )
    retirements = tuple(
        Fault(
            at=3.0 + 5.5 * index,
            kind="retire",
            target=(name,),
            lasts_s=rng.uniform(0.1, 0.5),
            # The first of each role has no time at all, and hands over what it has.
            amount=0.0 if name.endswith("0") else 3.0,
        )
        for index, name in enumerate(names)
    )
    return replace(
        plan,
        routers=routers,
        workers=workers,
        requests=requests,
        faults=retirements,
        max_queue=64,
        routing=replace(plan.routing, placement="disaggregated"),
        carrier_failures=0.0,
    )
