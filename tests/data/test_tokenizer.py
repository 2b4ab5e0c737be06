"""Subword tokenizers against the library that trained them, and by hand."""

import json

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, processors, trainers

from dape_jax.data import cache, text
from dape_jax.data.tokenizer import load_tokenizer
from dape_jax.errors import UserError

SENTENCES = ["the cat sat on the mat", "the dog sat on the log", "caf\u00e9 \U0001f600 naïve\n\n  the end", ""]


@pytest.fixture
def trained():
    """A byte-level BPE tokenizer of the library, without any token of its own for the end."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(SENTENCES * 3, vocab_size=290, show_progress=False)
    return tokenizer


@pytest.fixture
def gpt2(trained, tmp_path):
    """The trained vocabulary as GPT-2's files, in a folder below a package's."""
    folder = tmp_path / "package" / "data"
    folder.mkdir(parents=True)
    trained.save_model(str(folder))
    ids = json.loads((folder / "vocab.json").read_text())
    (folder / "encoder.json").write_text(json.dumps({**ids, "<|endoftext|>": len(ids)}))
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    (folder / "vocab.json").unlink()
    return folder


def test_gpt2_files_encode_as_the_library_that_made_them(trained, gpt2):
    coder = load_tokenizer(str(gpt2))
    assert load_tokenizer(str(gpt2.parent)).describe() == coder.describe()
    assert coder.vocab_size == trained.get_vocab_size() + 1
    assert coder.end_of_document == coder.vocab_size - 1
    assert coder.describe()["end_of_document"] == {
        "id": coder.end_of_document, "token": "<|endoftext|>", "origin": "own",
    }  # fmt: skip
    for sentence, ids in zip(SENTENCES, coder.encode_batch(SENTENCES), strict=True):
        assert ids.tolist() == trained.encode(sentence).ids
        assert np.array_equal(coder.encode(sentence), ids)
        assert coder.decode(ids) == sentence
    assert max(len(coder.encode(s)) / len(s.encode()) for s in SENTENCES if s) < 0.9


def test_gpt2_merges_by_hand(tmp_path):
    letters = [*"helo", "\u0120"]  # GPT-2 writes a space as U+0120
    merges = ["h e", "l l", "he ll", "\u0120 hell"]
    ids = {t: i for i, t in enumerate([*letters, *(m.replace(" ", "") for m in merges), "<|endoftext|>"])}
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    coder = load_tokenizer(str(tmp_path))
    hell, space_hell = ids["hell"], ids["\u0120hell"]
    assert coder.encode("hello hello").tolist() == [hell, ids["o"], space_hell, ids["o"]]
    assert coder.encode("hleol").tolist() == [ids[c] for c in "hleol"]
    assert coder.decode(np.asarray([hell, ids["<|endoftext|>"], space_hell])) == "hell\ufffd hell"


def saved(tokenizer, path):
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


def test_a_tokenizer_json_without_an_end_gets_one_more_id(trained, tmp_path):
    coder = saved(trained, tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path)).describe() == coder.describe()  # the folder that holds it
    assert coder.vocab_size == trained.get_vocab_size() + 1
    assert coder.describe()["end_of_document"] == {
        "id": trained.get_vocab_size(), "token": None, "origin": "appended",
    }  # fmt: skip
    ids = coder.encode(SENTENCES[0])
    assert ids.tolist() == trained.encode(SENTENCES[0]).ids
    ending = np.append(ids, coder.end_of_document)
    assert coder.decode(np.concatenate([ending, ids])) == f"{SENTENCES[0]}\ufffd{SENTENCES[0]}"


@pytest.mark.parametrize("token", ["<|endoftext|>", "</s>", "<eos>"])
def test_its_own_end_is_used_and_no_text_gives_it(token, trained, tmp_path):
    trained.add_special_tokens(["<pad>", token])
    coder = saved(trained, tmp_path / "tokenizer.json")
    assert coder.describe()["end_of_document"]["token"] == token
    assert coder.end_of_document == trained.token_to_id(token)
    assert coder.vocab_size == trained.get_vocab_size()
    written = f"a{token}b"
    assert coder.end_of_document in trained.encode(written).ids
    assert coder.end_of_document not in coder.encode(written)
    assert coder.decode(coder.encode(written)) == written


def test_nothing_is_cut_or_added(trained, tmp_path):
    """A file may ask for truncation, padding and special tokens around the text; none of them is a document's."""
    trained.add_special_tokens(["[CLS]", "[SEP]"])
    plain = [trained.encode(s).ids for s in SENTENCES]
    inner = trained._tokenizer
    inner.post_processor = processors.BertProcessing(("[SEP]", inner.token_to_id("[SEP]")),
                                                     ("[CLS]", inner.token_to_id("[CLS]")))  # fmt: skip
    inner.enable_truncation(4)
    inner.enable_padding(length=60)
    coder = saved(trained, tmp_path / "tokenizer.json")
    assert [x.tolist() for x in coder.encode_batch(SENTENCES)] == plain


def test_content_identifies_it_and_the_path_does_not(trained, tmp_path, text_folder):
    first = saved(trained, tmp_path / "a.json")
    assert saved(trained, tmp_path / "b.json").describe() == first.describe()
    trained.add_special_tokens(["<x>"])
    other = saved(trained, tmp_path / "a.json")
    assert other.describe()["sha256"] != first.describe()["sha256"]
    source = text.folder(str(text_folder), "*")
    made = [cache.open_or_build(source, coder, tmp_path / "cache", 0.2, 0.2, False)
            for coder in (first, load_tokenizer(str(tmp_path / "b.json")), other)]  # fmt: skip
    assert made[0].directory == made[1].directory
    assert made[0].directory != made[2].directory
    assert made[0].manifest["unknown_tokens"] == 0
    for name, (start, end) in zip(made[0].names(0, 12), made[0].documents, strict=True):
        ids = made[0].tokens[start:end]
        assert ids[-1] == first.end_of_document
        assert first.decode(ids[:-1]) == (text_folder / name).read_text()


def test_what_a_vocabulary_cannot_express_is_counted_or_refused(tmp_path, text_folder):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    source = text.folder(str(text_folder), "*")
    made = cache.open_or_build(source, saved(words, tmp_path / "words.json"), tmp_path / "cache", 0.2, 0.2, False)
    assert made.manifest["unknown_tokens"] == len(made.tokens) - 12 > 1000
    words.model = models.WordLevel({"abc": 0})
    with pytest.raises(UserError, match="cannot encode the text: .*UNK"):
        saved(words, tmp_path / "none.json").encode("abd")
    characters = Tokenizer(models.BPE())
    characters.train_from_iterator(["abc"], trainers.BpeTrainer(show_progress=False))
    assert characters.encode("ab?").ids == characters.encode("ab").ids  # what makes it worth refusing
    with pytest.raises(UserError, match="would vanish from the text"):
        saved(characters, tmp_path / "characters.json")


def test_bad_tokenizers_get_one_line(trained, gpt2, tmp_path):
    def refused(name, message):
        with pytest.raises(UserError, match=message) as error:
            load_tokenizer(str(name))
        assert "\n" not in str(error.value)

    refused("gpt2", "data.tokenizer='gpt2' is unknown.*a path of a tokenizer.json would also do")
    refused("nowhere/tokenizer.json", "data.tokenizer='nowhere/tokenizer.json' does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"holds neither tokenizer.json nor encoder.json with vocab.bpe")
    (tmp_path / "x.json").write_text('{"model": 3}')
    refused(tmp_path / "x.json", "is no tokenizer.json of the tokenizers library")
    (tmp_path / "y.json").write_bytes(b"\xff\xfe")
    refused(tmp_path / "y.json", "is no tokenizer.json of the tokenizers library")
    ids = json.loads((gpt2 / "encoder.json").read_text())
    merged = next(token for token in ids if len(token) == 2)
    (gpt2 / "encoder.json").write_text(json.dumps({t: i for t, i in ids.items() if t != merged}))
    refused(gpt2, "encoder.json and vocab.bpe are no vocabulary: .*out of vocabulary")
