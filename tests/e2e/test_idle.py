"""Decision 35: a stack that does nothing uses next to no CPU. Processor time of the whole process tree, not wall time."""

import time

import psutil
from pd import assert_baseline

from oasis_sglang.client import generate

SECONDS = 60
CORES = 0.20


def cpu_seconds(stack) -> float:
    total = 0.0
    for server in stack.servers.values():
        leader = psutil.Process(server.pid)
        for process in (leader, *leader.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def test_an_idle_stack_uses_less_than_a_fifth_of_a_core(oasis_stack, prompt_maker):
    stack = oasis_stack()
    generate(stack.url, prompt_maker.short()[0], max_new_tokens=4)  # connections are open, caches filled
    assert_baseline(stack)
    time.sleep(2)
    before = cpu_seconds(stack)
    time.sleep(SECONDS)
    used = (cpu_seconds(stack) - before) / SECONDS
    print(f"idle stack: {used:.3f} cores over {SECONDS} s")
    assert used < CORES
