"""Work that any thread leaves for one."""

from __future__ import annotations

import os
import select
import threading

from decode_node.inbox import Inbox


def readable(inbox: Inbox) -> bool:
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    return bool(poll.poll(0))


def test_what_is_left_is_taken_once_and_in_order():
    inbox = Inbox()
    assert not readable(inbox) and inbox.take() == []
    inbox.put("a", 1)
    inbox.put("b")
    assert readable(inbox) and inbox.take() == [("a", 1), ("b",)]
    assert not readable(inbox) and inbox.take() == []
    inbox.close()


def test_many_threads_leave_work_for_one_that_waits():
    inbox, taken, poll = Inbox(), [], select.poll()
    poll.register(inbox, select.POLLIN)
    threads = [threading.Thread(target=lambda k=k: [inbox.put(k, n) for n in range(500)]) for k in range(4)]
    for thread in threads:
        thread.start()
    while len(taken) < 2000:
        assert poll.poll(15_000), "woken for everything"
        taken += inbox.take()
    for thread in threads:
        thread.join()
    assert [[n for of, n in taken if of == k] for k in range(4)] == [list(range(500))] * 4
    inbox.close()


def test_after_its_end_nobody_writes_to_a_descriptor_that_may_be_anothers():
    inbox = Inbox()
    number = inbox.fileno()
    inbox.close()
    inbox.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == number and inbox.fileno() < 0
        inbox.put("late")
        poll = select.poll()
        poll.register(other, select.POLLIN)
        assert not poll.poll(0) and inbox.take() == [("late",)]
    finally:
        os.close(other)
