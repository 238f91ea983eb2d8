"""The prompts of the exactness matrix: 20 to 7,500 tokens of real text, whole and broken pages, more than one chunk."""

LENGTHS = (48, 300, 800, 1503, 2048, 3005, 5000, 7500)
OUTPUT_TOKENS = 64


def prompts(maker, text: str) -> list[list[int]]:
    shortest = maker.chat("Name three long rivers of Europe, their sources and one sea.")[:20]
    return [shortest, *(maker.cut(text, length, skip=3 * length) for length in LENGTHS)]
