"""Compare our tokenizer with `AutoTokenizer` on folders that have no tokenizer.json.

The folders contain slow and fast tokenizers that are based on a real tokenizer.model or on a
vocab.txt."""

import io
import json

import numpy as np
import pytest
import sentencepiece

from distributed_training.data.corpus import read_prose
from distributed_training.data.pieces import Piece
from distributed_training.data.tokenizer import Tokenizer
from tests.data.theirs import TheirTokenizer
from tests.support import refused

MARKS = ("<|turn|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant{{ '\n' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "what is a name </s> ?"},
    {"role": "assistant", "content": "the name  of a list"},
    {"role": "user", "content": " and "},
    {"role": "assistant", "content": "the value"},
]
ANSWERS = ["the name of a list", "the value"]
TEXTS = ["The value of a name is returned.\n\n A naïve 北京 🙂 <|end|> x", "a", " </s> ", ""]
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the value of a list is name what and user assistant"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def added(first, **options):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    tokens = [{"content": mark, "special": True, **plain, **options} for mark in MARKS]
    return {str(first + index): token for index, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def model():
    """Train a tokenizer.model with 400 tokens and byte fallback, and return its content."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(read_prose()[:40]), model_writer=written, vocab_size=400,
        model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return written.getvalue()


IN_FILE = {"added_tokens.json": {mark: 400 + index for index, mark in enumerate(MARKS)}}
# Name -> (class, vocabulary file, additional settings, additional files)
CASES = {
    "fast, added_tokens.json": ("LlamaTokenizer", "tokenizer.model", {}, IN_FILE),
    "fast, marks that take the space before them": (
        "LlamaTokenizer", "tokenizer.model", {"added_tokens_decoder": added(400, lstrip=True)}, {},
    ),
    "slow, added_tokens_decoder": (
        "GPTSw3Tokenizer", "spiece.model", {"added_tokens_decoder": added(400)}, {},
    ),
    "vocab.txt": (
        "BertTokenizer", "vocab.txt", {"unk_token": "[UNK]", "pad_token": "[PAD]"},
        {"added_tokens.json": {mark: len(WORDS.split()) + n for n, mark in enumerate(MARKS)}},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:This sequence already has")
@pytest.mark.parametrize("case", CASES)
def test_ids_equal_transformers_and_only_answers_are_trained_on(case, model, tmp_path):
    cls, file, settings, files = CASES[case]
    settings = {"tokenizer_class": cls, **NAMES, "chat_template": TEMPLATE, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    content = WORDS.replace(" ", "\n").encode() if file == "vocab.txt" else model
    (tmp_path / file).write_bytes(content)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer, hf_tokenizer = Tokenizer(tmp_path), TheirTokenizer(tmp_path)
    assert tokenizer.facts.kind == cls
    assert hf_tokenizer.read("is_fast") == case.startswith(("fast", "vocab"))
    for text in TEXTS:
        ((ids, mask),) = tokenizer.encode_pieces([Piece(text)])
        before, after = tokenizer.added_ids
        assert [*before, *ids, *after] == hf_tokenizer(text)["input_ids"]
        assert mask.all()
    text = hf_tokenizer.apply_chat_template(CHAT, tokenize=False)
    if not hf_tokenizer.read("is_fast"):
        with refused(str(tmp_path), cls):
            tokenizer.encode_pieces([Piece(text, [(0, 1)], templated=True)])
        return
    contents = [message["content"] for message in CHAT if message["role"] == "assistant"]
    answers = [content + "<|end|>\n" for content in contents]
    spans = [(text.index(answer), text.index(answer) + len(answer)) for answer in answers]
    ((ids, mask),) = tokenizer.encode_pieces([Piece(text, spans, templated=True)])
    assert ids.tolist() == hf_tokenizer.apply_chat_template(CHAT)["input_ids"]
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    learned = [hf_tokenizer.use("decode", ids[first:last]) for first, last in edges]
    assert [" ".join(text.replace("<|end|>", "").split()) for text in learned] == ANSWERS
    assert all("<|end|>" in text and "<|turn|>" not in text for text in learned)


def test_an_unreadable_model_file_is_refused(model, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", **NAMES})
    )
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with refused(str(tmp_path)):
        assert Tokenizer(tmp_path).facts
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert Tokenizer(tmp_path).num_tokens == 400
