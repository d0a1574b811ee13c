"""One planning pass at a time: who gets a piece, beside whom, on which pages. Pages of 4 tokens."""

import pytest

from engine.block_manager.fingerprint import HashChain
from engine.block_manager.manager import BlockManager
from engine.config import SchedulerConfig
from engine.metrics import Metrics
from engine.scheduler.life import State
from engine.scheduler.queue import RequestQueue
from engine.scheduler.scheduler import Scheduler
from engine.testing.fakes import FakeClock, ManualCopyEngine


class Bench:
    """A scheduler over a pool, with nothing around it."""

    def __init__(self, make_entry, *, pages=16, **options):
        config = SchedulerConfig(**options)
        self.manager = BlockManager(
            num_pages=pages,
            page_size=4,
            num_chunks=8,
            pages_per_chunk=2,
            copies=ManualCopyEngine(),
            metrics=Metrics(),
            page_bytes_all_layers=1,
            clock=FakeClock(),
        )
        self.queue = RequestQueue(config)
        self.scheduler = Scheduler(config, self.manager, self.queue, bytes_per_token=1)
        self._make_entry = make_entry

    def add(self, user, length=8, **options):
        entry = self._make_entry(user, length=length, **options)
        entry.chain = HashChain.from_records(entry.prepared.records, b"", 4)
        self.queue.admit(entry)
        return entry

    def plan(self, in_flight=(), upcoming=None):
        return self.scheduler.plan(0.0, in_flight, upcoming)


@pytest.fixture
def bench(make_entry):
    return lambda **options: Bench(make_entry, **options)


def users(planned):
    return [piece.entry.line.user_id for piece in planned.step.pieces]


def test_planned_requests_leave_the_queue_in_its_order(bench):
    bench = bench()
    late, early = bench.add("late", arrival_s=2.0), bench.add("early", arrival_s=1.0)
    planned = bench.plan()
    assert users(planned) == ["early", "late"]
    assert len(bench.queue) == 0
    assert late.state is early.state is State.PLANNED


def test_upcoming_step_is_filled_up(bench):
    bench = bench(max_batch_requests=2)
    bench.add("a")
    first = bench.plan()
    bench.add("b")
    bench.add("c")
    second = bench.plan(upcoming=first.step)
    assert second.step is first.step
    assert users(second) == ["a", "b"]
    assert [piece.entry.line.user_id for piece in second.added] == ["b"]
    assert second.step.is_closed
    assert users(bench.plan(upcoming=second.step)) == ["a", "b"]


def test_users_in_flight_and_in_the_step_are_left_alone(bench):
    bench = bench()
    running = bench.add("a")
    bench.plan()
    bench.add("a", length=9)
    bench.add("b")
    planned = bench.plan(in_flight=[running])
    assert users(planned) == ["b"]
    bench.add("b", length=9)
    assert users(bench.plan([running], planned.step)) == ["b"]


def test_rows_pairs_and_pages_of_a_piece_are_written_into_the_plan(bench):
    bench = bench()
    bench.add("a", length=10, candidates=4)
    planned = bench.plan()
    (piece,) = planned.step.pieces
    assert (piece.shape.start, piece.shape.stop) == (0, 10)
    assert piece.shape.suffix.tolist() == [0, 1, 2, 3]
    assert (planned.step.num_rows, planned.step.num_pairs) == (14, 55 + 40)
    assert len(piece.reservation.block_table) == 3
    assert piece.is_last


def test_removed_piece_takes_its_rows_out_of_the_plan(bench):
    bench = bench()
    bench.add("a", length=10, candidates=4)
    bench.add("b", length=4, candidates=1)
    step = bench.plan().step
    step.remove(step.pieces[0])
    assert (step.num_rows, step.num_pairs) == (5, 10 + 4)
    assert [piece.entry.line.user_id for piece in step.pieces] == ["b"]


def test_first_pass_over_lets_younger_go_and_the_next_does_not(bench):
    bench = bench(pages=4)
    running = bench.add("a", length=8)
    bench.plan()
    big = bench.add("b", length=12)
    bench.add("c", length=4)
    planned = bench.plan(in_flight=[running])
    assert users(planned) == ["c"] and big.was_passed_over
    bench.add("d", length=4)
    assert users(bench.plan(in_flight=[running])) == []
    assert [entry.line.user_id for entry in bench.queue] == ["b", "d"]


def test_request_passed_over_once_keeps_its_right_between_its_pieces(bench):
    bench = bench(pages=4, max_piece_tokens=4)
    running = bench.add("a", length=16)
    hold = bench.plan().step.pieces[0].reservation
    big = bench.add("b", length=16)
    bench.plan(in_flight=[running])
    bench.manager.commit(hold)
    bench.queue.finish(running)
    bench.add("c", length=4)
    step = bench.plan().step
    assert [(piece.shape.start, piece.shape.stop) for piece in step.pieces] == [(0, 4), (0, 4)]
    assert big.state is State.PLANNED and big.was_passed_over


def test_only_piece_of_a_step_may_exceed_its_predicted_time(bench):
    bench = bench(max_step_ms=1.0)
    bench.add("a").version.cost.observe(10, 0, 1.0)
    bench.add("b")
    assert users(bench.plan()) == ["a"]


def test_step_runs_one_version_and_the_oldest_request_says_which(bench):
    bench = bench()
    bench.add("a", arrival_s=1.0, version="2")
    bench.add("b", arrival_s=2.0)
    bench.add("c", arrival_s=3.0, version="2")
    first = bench.plan()
    assert users(first) == ["a", "c"]
    assert first.step.version.name == "2"
    assert users(bench.plan(in_flight=[piece.entry for piece in first.added])) == ["b"]


def test_request_that_lacks_space_again_stops_younger_ones_of_its_version_only(bench):
    bench = bench(pages=4)
    running = bench.add("running", length=8)
    bench.plan()
    large = bench.add("large", length=16, arrival_s=1.0)
    bench.plan(in_flight=[running])
    assert large.was_passed_over
    bench.add("young", length=4, arrival_s=2.0)
    bench.add("other", length=4, arrival_s=3.0, version="2")
    assert users(bench.plan(in_flight=[running])) == ["other"]
