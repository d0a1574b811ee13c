"""A core put together from fakes, so that a test decides when time passes, when a step runs on
the device and when a copy moves.

The runner keeps, instead of K/V, one number per history row in fake pages, and copies move these
numbers between fake pages and fake host slots. A score is a pure function of the numbers a piece
reads and of the candidate's record, so an answer is right exactly when every row that was read is
the request's own. Free pages are poisoned.
"""

import functools
from types import SimpleNamespace

import msgspec
import numpy as np
from engine_models import CONFIGS
from xxhash import xxh3_64_intdigest

from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.commands import ForgetUser, Forgotten, LoadWeights, Reply, ServedWeights
from engine.config import (
    CacheConfig,
    EngineConfig,
    HealthConfig,
    SchedulerConfig,
    TransferConfig,
    WeightsConfig,
)
from engine.core import EngineCore
from engine.core_parts import CoreParts, ServedModel, describe_served
from engine.metrics import Metrics
from engine.models.hstu.model import HstuModel
from engine.request_builder import build_request
from engine.runner.step import PieceResult, StepResult
from engine.testing.fakes import FakeClock, ManualCopyEngine, ManualExecutor, ManualLoader
from engine.testing.models import random_tensors
from engine.transfer.jobs import Direction
from engine.types import Task

POISON = -1
BYTES_PER_PAGE = 100


@functools.cache
def tiny_model(name, weights_version="1"):
    config = msgspec.structs.replace(CONFIGS[name], weights_version=weights_version)
    return HstuModel(config, random_tensors(config))


def events(count, salt=0):
    """Item numbers of a history; different salts differ from the first event on."""
    return [(salt + 3 * index + index * index) % 40 for index in range(count)]


def item_ids(numbers):
    return np.array([10 * number + 1 for number in numbers], np.int64)


def salt_of(version):
    """What makes the numbers of one weights version differ from those of others."""
    return xxh3_64_intdigest(version.encode())


def row_numbers(records, salt):
    """What the fake pages hold for history rows: one number per record, int64 [L]; other weights
    give other numbers."""
    return np.array([xxh3_64_intdigest(row.tobytes(), salt) >> 1 for row in records], np.int64)


def answer_of(history_rows, record, width):
    """A row's output: float32 [width], a pure function of the rows it reads and of its record."""
    seen = history_rows.tobytes() + record.tobytes()
    return np.array([xxh3_64_intdigest(seen, task) / 2**64 for task in range(width)], np.float32)


def recompute(prepared, version="1"):
    """Scores without any cache, float32 [candidates, 2]."""
    rows = row_numbers(prepared.records, salt_of(version))
    candidates = prepared.suffix_records[prepared.num_fixed_suffix :]
    return np.stack([answer_of(rows, record, 2) for record in candidates])


class Storage:
    """Fake bytes: one number per token slot. device [pages, page_size], host [slots, page_size]."""

    def __init__(self, num_pages, num_slots, page_size):
        self.device = np.full((num_pages, page_size), POISON, np.int64)
        self.host = np.full((num_slots, page_size), POISON, np.int64)

    def poison(self, pages):
        self.device[pages] = POISON


class StoredCopies(ManualCopyEngine):
    """Manual copies that move fake bytes: as late as they may, garbage until then."""

    def __init__(self, storage, **options):
        super().__init__(**options)
        self._storage = storage

    def jobs(self, direction):
        """Jobs that have neither ended nor been cancelled, in order."""
        alive = {*self.queued, *self.started}
        return [job for job in self.submitted if job in alive and job.direction is direction]

    @property
    def onloads(self):
        return self.jobs(Direction.ONLOAD)

    @property
    def offloads(self):
        return self.jobs(Direction.OFFLOAD)

    def start(self, job):
        super().start(job)
        if job.direction is Direction.ONLOAD:
            self._storage.poison(job.pages)

    def advance(self, job, pages_done):
        super().advance(job, pages_done)
        self._move(job, pages_done)

    def _end(self, job, pages_done, error):
        super()._end(job, pages_done, error)
        self._move(job, pages_done)

    def _move(self, job, count):
        device, host = self._storage.device, self._storage.host
        pages, slots = job.pages[:count], job.host_slots[:count]
        if job.direction is Direction.ONLOAD:
            device[pages] = host[slots]
        else:
            host[slots] = device[pages]


class RecordingRunner:
    """Runs steps of one weights version on the fake pages and remembers them.

    Attributes:
        version: Its name; the numbers it writes are of that version alone.
        steps: One entry a step: `works`, `scratch` and `version`; of all versions.
        run_s, onload_wait_s: What the next steps take; the clock moves by run_s.
        error: Raised instead of running.
    """

    def __init__(self, storage, copies, clock, version, steps):
        self.version, self.steps = version, steps
        self.run_s, self.onload_wait_s = 0.01, 0.0
        self.error = None
        self._storage, self._copies, self._clock = storage, copies, clock

    def run(self, works, *, scratch, copy_deadline_s):
        self.steps.append(SimpleNamespace(works=works, scratch=scratch, version=self.version))
        self._clock.advance(self.run_s)
        if self.error is not None:
            raise self.error
        failed = [self._is_missing(work.onload, copy_deadline_s) for work in works]
        pages = self._storage.device
        if scratch:
            (work,) = works
            assert work.start == 0, "a scratch run computes everything"
            pages = np.full((len(work.block_table), pages.shape[1]), POISON, np.int64)
        for work in works:
            rows = np.arange(work.start, work.stop)
            slots = work.block_table[rows // pages.shape[1]], rows % pages.shape[1]
            assert scratch or (pages[slots] == POISON).all() or not len(rows), "rows in used slots"
            pages[slots] = row_numbers(
                work.prepared.records[work.start : work.stop], salt_of(self.version)
            )
        results = [
            PieceResult(copy_failed=True) if is_missing else self._answer(work, pages)
            for work, is_missing in zip(works, failed, strict=True)
        ]
        return StepResult(results, self.run_s, self.onload_wait_s)

    def _is_missing(self, job, deadline_s):
        return job is not None and not self._copies.wait_layer(job, 0, deadline_s)

    def _answer(self, work, pages):
        prepared = work.prepared
        rows = pages[work.block_table].reshape(-1)[: work.stop]
        if not len(work.suffix):
            return PieceResult()
        assert work.stop == prepared.length, "a suffix row reads the whole history"
        embedding, items, item_scores, scores = None, None, None, None
        if prepared.read_row is not None and prepared.read_row in work.suffix:
            embedding = answer_of(rows, prepared.suffix_records[prepared.read_row], 4)
        if work.task is Task.RETRIEVE:
            items = np.arange(work.top_k, dtype=np.int64)
            item_scores = answer_of(rows, prepared.suffix_records[prepared.read_row], work.top_k)
        candidates = work.suffix[work.suffix >= prepared.num_fixed_suffix]
        if work.task is Task.RANK:
            scores = np.stack(
                [answer_of(rows, prepared.suffix_records[row], 2) for row in candidates]
            )
        return PieceResult(
            scores=scores,
            user_embedding=embedding if work.wants_user_embedding else None,
            items=items,
            item_scores=item_scores,
        )


class SilentWake:
    """Nobody sleeps on it."""

    def fileno(self):
        raise AssertionError("a test core is stepped, not waited for")

    def clear(self):
        pass

    def wait(self, timeout_s):
        raise AssertionError("a test core never sleeps")

    def close(self):
        pass


class CoreUnderTest:
    """An engine core on fakes; pages of 4 tokens, chunks of 2 pages.

    Every `step` recounts the bookkeeping and collects the outbox; a second outcome of a request
    is an error at once.
    """

    def __init__(
        self,
        model="append",
        *,
        pages=64,
        chunks=64,
        page_size=4,
        tiers="tiered",
        automatic_copies=True,
        copy_timeout_s=10.0,
        max_onload_bytes=0,
        weights=None,
        health=None,
        **scheduler,
    ):
        self._model_name = model
        self.model = tiny_model(model) if isinstance(model, str) else model
        pages_per_chunk = 2
        config = EngineConfig(
            cache=CacheConfig(
                tiers=tiers,
                device_pages=pages,
                page_size=page_size,
                chunk_size=page_size * pages_per_chunk,
            ),
            scheduler=SchedulerConfig(**scheduler),
            transfer=TransferConfig(
                copy_timeout_s=copy_timeout_s, max_onload_bytes=max_onload_bytes
            ),
            weights=weights or WeightsConfig(),
            health=health or HealthConfig(),
        )
        self._config = config
        self.clock, self.metrics = FakeClock(), Metrics()
        storage = Storage(pages, chunks * pages_per_chunk, page_size)
        self.copies = StoredCopies(storage, is_automatic=automatic_copies, clock=self.clock)
        self._storage = storage
        self.runner = self._runner(self.model.spec.weights_version, [])
        self.executor = ManualExecutor()
        self.manager = BlockManager(
            num_pages=pages,
            page_size=page_size,
            num_chunks=chunks if tiers == "tiered" else 0,
            pages_per_chunk=pages_per_chunk,
            copies=self.copies,
            metrics=self.metrics,
            page_bytes_all_layers=BYTES_PER_PAGE,
            clock=self.clock,
            on_pages_freed=storage.poison,
        )
        self.loader = ManualLoader()
        self.observed = []
        self.core = EngineCore(
            CoreParts(
                config=config,
                served=ServedModel(
                    model=self.model,
                    info=describe_served(
                        self.model, config, backend="fake", exactness="bitwise", token_bytes=1
                    ),
                    runner=self.runner,
                ),
                loader=self.loader,
                manager=self.manager,
                copies=self.copies,
                executor=self.executor,
                wake=SilentWake(),
                metrics=self.metrics,
                clock=self.clock,
                observer=self.observed.append,
            )
        )
        self.requests, self.outcomes, self.replies, self.announced = {}, {}, {}, []
        self.wholes = {}
        self.outcome_order = []
        self._num_forgets = 0

    # Requests

    def rank(self, user, history, candidates=3, **options):
        """Submit; returns the request id. history: item numbers, or how many events of the user's
        own. candidates: item numbers, or how many."""
        numbers = range(candidates) if isinstance(candidates, int) else candidates
        return self._submit(
            Task.RANK, user, history, candidates={"item": item_ids(numbers)}, **options
        )

    def delta(self, user, history, base, candidates=3, **options):
        """Rank with only those events of the history that follow the base of an earlier answer
        (its usage). The answer must be that of the whole history."""
        if isinstance(history, int):
            history = events(history, salt=sum(map(ord, user)))
        first = base.base_length - options.get("history_start", 0)
        request_id = self.rank(
            user,
            history[first:],
            candidates,
            base_length=base.base_length,
            base_fingerprint=base.fingerprint,
            **options,
        )
        self.wholes[request_id] = build_request(
            task=Task.RANK,
            user_id=user,
            history={"item": item_ids(history)},
            candidates=self.requests[request_id].candidates,
            **options,
        )
        return request_id

    def retrieve(self, user, history, **options):
        return self._submit(Task.RETRIEVE, user, history, **options)

    def prefetch(self, user, history=None, **options):
        return self._submit(Task.PREFETCH, user, history, **options)

    def _submit(self, task, user, history, **options):
        if isinstance(history, int):
            history = events(history, salt=sum(map(ord, user)))
        if history is not None and not isinstance(history, dict):
            history = {"item": item_ids(history)}
        options.setdefault("request_id", f"q{len(self.requests) + 1}")
        request = build_request(
            task=task, user_id=user, history=history, arrival_s=self.clock(), **options
        )
        self.requests[request.request_id] = request
        self.core.submit(request)
        self.collect()
        return request.request_id

    def cancel(self, *request_ids):
        for request_id in request_ids:
            self.core.cancel(request_id)
        self.collect()

    def forget(self, user, namespace=""):
        self._num_forgets += 1
        ticket = f"forget-{user}-{self._num_forgets}"
        self.core.run(ticket, ForgetUser(namespace=namespace, user_id=user))
        self.collect()
        return ticket

    # Commands

    def command(self, ticket, command):
        self.core.run(ticket, command)
        self.collect()

    def result(self, ticket):
        """The result of a command; None while it is not complete."""
        reply = self.replies.get(ticket)
        if reply is None:
            return None
        assert reply.error is None, reply.error
        return reply.result

    def load(self, version, **options):
        """Load a version beside the others; its status."""
        ticket = f"load-{version}"
        self.command(ticket, LoadWeights(path=version, **options))
        self.loader.end(self.served_model(version))
        self.step()
        return self.result(ticket).status

    def served_model(self, version):
        """The harness's model under another weights version."""
        model = tiny_model(self._model_name, version)
        return ServedModel(
            model=model,
            info=describe_served(
                model, self._config, backend="fake", exactness="bitwise", token_bytes=1
            ),
            runner=self._runner(version, self.runner.steps),
        )

    def _runner(self, version, steps):
        return RecordingRunner(self._storage, self.copies, self.clock, version, steps)

    # Time

    def step(self):
        """One pass of the loop. False: the core has nothing to do until a copy or a step ends."""
        has_progress = self.core.step()
        self.core.check_invariants()
        self.collect()
        return has_progress

    def steps(self):
        """Passes until the core has nothing to do; the device does not move."""
        for _ in range(100):
            if not self.step():
                return
        raise AssertionError("the core is never done")

    def run_device(self):
        """The step on the device runs to its end; the core has not looked yet."""
        self.executor.run_next()

    def turn(self):
        """The device runs its step, and the core does all it can."""
        self.run_device()
        self.steps()

    def settle(self):
        """Until nothing is left to do (copies, unless automatic, stay where they are)."""
        for _ in range(500):
            if self.step():
                continue
            if not self.executor.waiting:
                return
            self.run_device()
        raise AssertionError("requests starve")

    def serve(self, request_id):
        """Settle and give the response to a request."""
        self.settle()
        return self.response(request_id)

    def warm(self, user, history, **options):
        """Let a history be computed and kept, in both tiers as far as they reach."""
        self.serve(self.prefetch(user, history, **options))

    def evict_device(self):
        """Push every state out of the device pool; host copies stay."""
        filler = self.manager.num_pages * self.manager.page_size
        assert filler <= 48, "one history must fill the pool"
        request_id = self.rank("filler", filler, candidates=1)
        self.settle()
        assert self.response(request_id).usage.computed_tokens == filler
        self.forget("filler")
        self.settle()

    # What came out

    def collect(self):
        for message in self.core.take_outbox():
            if isinstance(message, ServedWeights):
                self.announced.append(message)
                continue
            if isinstance(message, Reply):
                assert message.ticket not in self.replies, "a command ends once"
                self.replies[message.ticket] = message
                continue
            assert message.request_id not in self.outcomes, "a request has one outcome"
            assert (message.response is None) != (message.error is None)
            self.outcomes[message.request_id] = message
            self.outcome_order.append(message.request_id)
            if message.response is not None:
                self._check(message.request_id, message.response)

    def _check(self, request_id, response):
        """An answer is what a recompute gives, and its accounts add up."""
        usage, request = response.usage, self.requests[request_id]
        total = usage.device_tokens + usage.host_tokens + usage.computed_tokens
        assert total == usage.history_length
        if request.task is Task.RANK:
            request = self.wholes.get(request_id, request)
            np.testing.assert_array_equal(
                response.scores,
                recompute(self.model.prepare(request), usage.weights_version),
                strict=True,
            )

    def response(self, request_id):
        outcome = self.outcomes[request_id]
        assert outcome.error is None, outcome.error
        return outcome.response

    def error(self, request_id):
        error = self.outcomes[request_id].error
        assert error is not None, "the request was answered"
        return error

    def hits(self, request_id):
        """(device, host, computed) tokens."""
        usage = self.response(request_id).usage
        return usage.device_tokens, usage.host_tokens, usage.computed_tokens

    @property
    def forgotten(self):
        """Ticket -> what was removed, of every forget that is complete."""
        return {
            ticket: reply.result
            for ticket, reply in self.replies.items()
            if isinstance(reply.result, Forgotten)
        }

    @property
    def trace(self):
        """What the core did, "kind step", steps numbered from 1 as they first appear."""
        numbers = {}
        for event in self.observed:
            numbers.setdefault(event.step, len(numbers) + 1)
        return [f"{event.kind} {numbers[event.step]}" for event in self.observed]

    @property
    def pieces(self):
        """Of each step that ran: (user's row numbers aside) (start, stop, suffix rows) a piece."""
        return [
            [(work.start, work.stop, len(work.suffix)) for work in step.works]
            for step in self.runner.steps
        ]

    def lengths(self, user, namespace="", version=None):
        """(device_len, host_len) of a user's state; None when there is none."""
        view = self.core.user(namespace, user)
        if version is not None:
            view = self.manager.user(UserKey(namespace, user, version))
        return None if view is None else (view.device_len, view.host_len)

    def value(self, name, *labels):
        return self.metrics.value(name, *labels)

    def assert_everything_comes_back(self):
        """After all users are forgotten nothing is held: pages, chunks, copies, states."""
        self.settle()
        self.copies.is_automatic = True
        self.settle()
        for user in {(request.namespace, request.user_id) for request in self.requests.values()}:
            self.forget(user[1], user[0])
        self.settle()
        usage = self.core.usage()
        assert self.core.is_quiet
        assert (usage.pages_used, usage.chunks_used, usage.num_users) == (0, 0, 0)
        assert (usage.num_reservations, usage.num_copies, usage.num_leaving) == (0, 0, 0)
        unanswered = set(self.requests) - set(self.outcomes)
        assert not unanswered, "every request has an outcome"
