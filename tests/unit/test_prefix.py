"""The index of prefixes, against a naive model of every engine's cache."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.prefix import PrefixIndex, block_hashes

ENGINES = 3


class NaiveCache:
    """Blocks of one engine, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[int] = []

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self.blocks:
                self.blocks.remove(block)
            self.blocks.append(block)
        del self.blocks[: max(0, len(self.blocks) - self.capacity)]

    def depth(self, blocks: Sequence[int]) -> int:
        held = [block in self.blocks for block in blocks]
        return held.index(False) if False in held else len(held)


def depths(index: PrefixIndex, blocks: Sequence[int]) -> dict[int, int]:
    """Return the depth by engine, and check the form of the answer."""
    found: dict[int, int] = {}
    answer = index.depths(blocks)
    assert [depth for _, depth in answer] == sorted({depth for _, depth in answer})
    for mask, depth in answer:
        for engine in range(ENGINES):
            if mask >> engine & 1:
                assert engine not in found
                found[engine] = depth
    return found


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda ids: block_hashes([i for i in ids for _ in range(4)], 4)
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "add", "forget")),
        st.integers(0, ENGINES - 1),
        PROMPTS,
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, PROMPTS, st.lists(st.integers(0, 12), min_size=ENGINES, max_size=ENGINES))
def test_depths_are_those_of_a_naive_model(
    steps: list[tuple[str, int, tuple[int, ...]]], asked: tuple[int, ...], sizes: list[int]
) -> None:
    index, caches = PrefixIndex(), [NaiveCache(size) for size in sizes]
    for engine, size in enumerate(sizes):
        index.join(engine, size)
    for action, engine, blocks in steps:
        if action == "add":
            index.add(engine, blocks)
            caches[engine].add(blocks)
        else:
            index.forget(engine)
            caches[engine].blocks.clear()
        expected = {e: cache.depth(asked) for e, cache in enumerate(caches)}
        assert depths(index, asked) == {e: depth for e, depth in expected.items() if depth}
    for engine in range(ENGINES):
        index.forget(engine)
    assert not index._holders, "nothing is left of what nobody holds"


def test_a_hash_is_of_a_block_and_all_before_it() -> None:
    one = block_hashes([1, 2, 3, 4, 5, 6, 7], 2)
    assert len(one) == 3
    assert block_hashes([1, 2, 3, 4], 2) == one[:2]
    other = block_hashes([9, 2, 3, 4, 5, 6], 2)
    assert not set(one) & set(other)
    assert block_hashes([1], 2) == ()
    assert block_hashes([1, 2, 3, 4], 2, salt="x") != one[:2]


def test_the_least_recently_used_block_goes_first() -> None:
    index = PrefixIndex()
    index.join(0, 4)
    old, new = block_hashes(range(8), 4), block_hashes(range(100, 108), 4)
    index.add(0, old)
    index.add(0, new)
    index.add(0, old)
    index.add(0, block_hashes(range(200, 204), 4))
    assert depths(index, old) == {0: 2}
    assert depths(index, new) == {}


def test_an_engine_that_joins_again_has_an_empty_cache() -> None:
    index = PrefixIndex()
    index.join(0, 8)
    index.join(1, 8)
    blocks = block_hashes(range(12), 4)
    index.add(0, blocks)
    index.add(1, blocks[:2])
    assert index.depths(blocks) == [(0b10, 2), (0b01, 3)]
    index.join(0, 8)
    assert index.depths(blocks) == [(0b10, 2)]


def test_it_holds_for_engines_beyond_the_width_of_a_word() -> None:
    index = PrefixIndex()
    for engine in range(200):
        index.join(engine, 8)
    blocks = block_hashes(range(8), 4)
    index.add(199, blocks)
    index.add(3, blocks[:1])
    assert index.depths(blocks) == [(1 << 3, 1), (1 << 199, 2)]


def test_an_engine_that_lacks_what_it_should_hold_is_believed_to_keep_less() -> None:
    index = PrefixIndex()
    index.join(0, 100)
    for first in range(0, 100, 10):
        index.add(0, range(first, first + 10))
    index.observe(0, expected=10, found=4)
    assert index.depths(range(0, 10)) == [], "the oldest are gone"
    assert index.depths(range(90, 100)) == [(1, 10)]
    for _ in range(100):
        index.observe(0, expected=10, found=10)
    index.add(0, range(0, 10))
    assert index.depths(range(0, 10)) == [(1, 10)]
    assert index.depths(range(10, 20)) == [(1, 10)], "it keeps as much as ever"


def test_what_was_not_expected_teaches_nothing() -> None:
    index = PrefixIndex()
    index.join(0, 10)
    index.add(0, range(10))
    index.observe(0, expected=0, found=0)
    assert index.depths(range(10)) == [(1, 10)]
