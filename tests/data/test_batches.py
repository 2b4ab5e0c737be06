import itertools

import numpy as np
import pytest

from dape_jax.data import cache, text
from dape_jax.data.batches import Windows, training_batches
from dape_jax.data.tokenizer import ByteTokenizer
from dape_jax.errors import UserError


@pytest.fixture
def tokens(text_folder, tmp_path):
    return cache.open_or_build(text.folder(str(text_folder), "*"), ByteTokenizer(), tmp_path / "c", 0.2, 0.2, False)


def take(n, *args, **kwargs):
    return list(itertools.islice(training_batches(*args, **kwargs), n))


def test_windows_cover_the_split_once(tokens):
    windows = Windows(tokens, "train", 50)
    first, last = tokens.split_bounds("train")
    stream = np.asarray(tokens.tokens[first:last], np.int32)
    assert len(windows) == (len(stream) - 1) // 50
    targets = np.concatenate([windows[i][1:] for i in range(len(windows))])
    assert np.array_equal(targets, stream[1 : 1 + len(targets)])
    assert np.array_equal(windows[3], stream[150:201])


def test_a_row_is_a_function_of_seed_step_and_row(tokens):
    straight = take(12, tokens, 64, 8, seed=3, first_step=0)
    assert straight[0].shape == (8, 65)
    assert straight[0].dtype == np.int32
    for step in (1, 7, 11):
        assert np.array_equal(take(1, tokens, 64, 8, seed=3, first_step=step)[0], straight[step])
    assert not np.array_equal(take(1, tokens, 64, 8, seed=4, first_step=0)[0], straight[0])
    # A larger batch holds the same rows in the same order.
    wide = take(3, tokens, 64, 32, seed=3, first_step=0)
    assert np.array_equal(np.concatenate(wide), np.concatenate(straight))


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_a_batch(tokens, count):
    whole = take(3, tokens, 32, 8, seed=0, first_step=5)
    parts = [take(3, tokens, 32, 8, seed=0, first_step=5, process_index=p, process_count=count) for p in range(count)]
    for step in range(3):
        assert np.array_equal(np.concatenate([part[step] for part in parts]), whole[step])


def test_an_epoch_sees_every_window_once_and_the_next_in_another_order(tokens):
    windows = Windows(tokens, "train", 200)
    n = len(windows)
    rows = np.concatenate(take(2 * n, tokens, 200, 1, seed=0, first_step=0))
    every = sorted(w.tobytes() for w in (windows[i] for i in range(n)))
    first, second = rows[:n], rows[n:]
    assert sorted(r.tobytes() for r in first) == every
    assert sorted(r.tobytes() for r in second) == every
    assert not np.array_equal(first, second)


def test_bad_shapes_are_named(tokens):
    with pytest.raises(UserError, match=r"data.sequence_length=1000000: the train split has \d+ tokens"):
        Windows(tokens, "train", 10**6)
    with pytest.raises(UserError, match="training.batch_size=9 cannot be split over 2 processes"):
        take(1, tokens, 32, 9, seed=0, first_step=0, process_count=2)


def test_windows_stay_in_their_split(tokens):
    for split in ("train", "validation", "test"):
        first, last = tokens.split_bounds(split)
        for length in (50, last - first - 1, (last - first) // 2):
            windows = Windows(tokens, split, length)
            assert np.array_equal(windows[0], tokens.tokens[first : first + length + 1])
            assert first + len(windows) * length + 1 <= last
            assert len(windows[len(windows) - 1]) == length + 1
        with pytest.raises(UserError, match=f"the {split} split has"):
            Windows(tokens, split, last - first)
