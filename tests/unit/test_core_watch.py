"""When silence is taken for death, and when it is not."""

import threading

from engine.core_watch import SilenceWatch, thread_stacks


def verdicts(last_signs, calls):
    """What a watch with a limit of 3 s, to be asked every second, says at each call."""
    watch = SilenceWatch(limit_s=3.0, tick_s=1.0)
    return [watch.is_over(now_s, sign) for now_s, sign in zip(calls, last_signs, strict=True)]


def test_silence_is_over_after_the_limit():
    assert verdicts([0.0] * 6, [0, 1, 2, 3, 3.1, 4]) == [False, False, False, False, True, True]


def test_signs_of_life_are_no_silence():
    assert not any(verdicts(range(10), range(10)))


def test_a_watcher_that_was_held_up_gives_no_verdict():
    # Away from 1 to 100: the sign of 99.9 is read only after the first look at the clock.
    assert verdicts([1, 1, 1, 99.9], [0, 1, 100, 101]) == [False, False, False, False]


def test_silence_after_a_hold_up_is_seen_at_the_next_call():
    assert verdicts([1, 1, 1, 1], [0, 1, 100, 101]) == [False, False, False, True]


def test_the_first_call_gives_no_verdict():
    assert verdicts([-100.0], [0]) == [False]


def test_stacks_name_threads_and_their_functions():
    is_over = threading.Event()

    def wait_for_the_end():
        is_over.wait()

    thread = threading.Thread(target=wait_for_the_end, name="the sleeper")
    thread.start()
    try:
        text = thread_stacks()
    finally:
        is_over.set()
        thread.join()
    sleeper = text[text.index("thread the sleeper") :].partition("\n\n")[0]
    assert "in wait_for_the_end" in sleeper
    assert "test_stacks_name_threads_and_their_functions" in text
