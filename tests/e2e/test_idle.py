"""Decision 35: a stack that does nothing uses next to no CPU. Processor time of the whole process tree, not wall time."""

import time

from pd import assert_baseline

from oasis_sglang.client import generate

SECONDS = 60
CORES = 0.20


def test_an_idle_stack_uses_less_than_a_fifth_of_a_core(oasis_stack, prompt_maker):
    stack = oasis_stack()
    generate(stack.url, prompt_maker.short()[0], max_new_tokens=4)  # connections are open, caches filled
    assert_baseline(stack)
    time.sleep(2)
    before = stack.cpu_seconds()
    time.sleep(SECONDS)
    used = (stack.cpu_seconds() - before) / SECONDS
    print(f"idle stack: {used:.3f} cores over {SECONDS} s")
    assert used < CORES
