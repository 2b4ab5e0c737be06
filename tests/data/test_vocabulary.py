import json

import pytest
from tokenizers import Tokenizer

from dape_jax.data import cache, text, vocabulary
from dape_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from dape_jax.errors import UserError


@pytest.mark.parametrize(("validation", "test"), [(0.2, 0.2), (0.01, 0.01), (0.01, 0.98)])
def test_it_reads_the_train_documents_of_the_cache(validation, test, text_folder, tmp_path):
    (text_folder / "empty.txt").write_text("")
    source = text.folder(str(text_folder), "*")
    made = cache.open_or_build(source, ByteTokenizer(), tmp_path / "cache", validation, test, False)
    names, _ = made.split_documents("train")
    read = list(vocabulary.train_documents(source, validation, test, show_progress=False))
    assert sorted(read) == sorted((text_folder / name).read_text() for name in names)
    assert 0 < len(read) < 12


def test_a_vocabulary_of_the_asked_size_that_compresses(text_folder, tmp_path):
    documents = [path.read_text() for path in sorted(text_folder.glob("*"))]
    made = vocabulary.train_bpe(iter(documents), 400, show_progress=False)
    assert made == vocabulary.train_bpe(iter(documents), 400, show_progress=False)
    path = tmp_path / "v.json"
    path.write_text(made)
    coder = load_tokenizer(str(path))
    assert coder.vocab_size == 400
    assert coder.describe()["end_of_document"] == {"id": 0, "token": "<|endoftext|>", "origin": "own"}
    ids = coder.encode(documents[-1])
    assert len(ids) < 0.5 * len(documents[-1])
    assert coder.decode(ids) == documents[-1]
    unseen = "Ünseen \U0001f600 text\0\r\n<|endoftext|>"
    assert coder.decode(coder.encode(unseen)) == unseen
    # The first merge is the most frequent pair of neighbours within a word, spaces being part of the word after them.
    words = " ".join(documents).split(" ")
    pairs = [f"\u0120{w}"[i : i + 2] for w in words for i in range(len(w))]
    assert max(set(pairs), key=pairs.count) == "".join(json.loads(made)["model"]["merges"][0])
    assert Tokenizer.from_file(str(path)).get_vocab_size() == 400


def test_bad_sizes_and_texts_get_one_line():
    with pytest.raises(UserError, match="vocab_size=256: 257 or more is needed"):
        vocabulary.train_bpe(iter(["a"]), 256)
    with pytest.raises(UserError, match="vocab_size=300: the train documents have pairs for 259 only"):
        vocabulary.train_bpe(iter(["aaaa"]), 300, show_progress=False)

    def broken():
        yield "fine"
        raise UserError("file.jsonl, line 2: broken")

    with pytest.raises(UserError, match="line 2: broken"):
        vocabulary.train_bpe(broken(), 300, show_progress=False)
