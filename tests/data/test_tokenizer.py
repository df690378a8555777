"""Compare two tokenizers with their transformers equivalents: the shipped tokenizer, and a model
tokenizer that has a chat template."""

import json
import shutil
import subprocess
import sys
import unicodedata

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Builder

from distributed_training.data.cache import tokenize
from distributed_training.data.chats.prepare import (
    COPIED,
    NO_ANSWER,
    SPECIAL,
    UNKNOWN,
    Counts,
    read_pieces,
)
from distributed_training.data.corpus import read_prose
from distributed_training.data.pieces import Piece
from distributed_training.data.report import summarize
from distributed_training.data.tokenizer import EMBEDDED_DIR, Tokenizer
from distributed_training.settings.files import load_model_json
from distributed_training.settings.request import build_config, read_template
from tests.data.test_corpus import corpus_of
from tests.data.test_records import ANSWER, CHAT, USER
from tests.data.test_samples import jsonl, prepare
from tests.data.theirs import TheirTokenizer
from tests.support import edit_json, refused

END_OF_TEXT = "<|endoftext|>"
# As in Qwen3's template, turns are between markers, and only the last answer keeps its reasoning.
TURNS = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
    {{- '<|turn|>' + message.role + '\\n' }}
    {%- if THOUGHT and message.role == 'assistant' and loop.last %}{{- '<none>\\n' }}{% endif %}
    {{- message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{% endif %}"""
FORGETFUL = TURNS.replace("THOUGHT", "true")
PLAIN = TURNS.replace("THOUGHT", "false")
SAID = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence <|end|>"},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "Another one"},
]


def save_tokenizer(folder, built, eos="|", **settings):
    """Write a tokenizer of the tokenizers library to `folder`, and return `folder`."""
    built.save(str(folder / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def train_bpe(texts, special_tokens, vocab_size, before=None, **options):
    """Train a BPE on the bytes of `texts`. `before` is the pre-tokenizer, by default GPT-2's."""
    built = Builder(models.BPE(**options))
    built.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    built.train_from_iterator(texts, trainer)
    return built


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a tokenizer.json with a 400-token byte-level BPE that prepends a special token to each
    input. Return the folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    marks = ["<|begin|>", "<|stop|>", "<|turn|>", "<|end|>"]
    built = train_bpe(read_prose()[:50], marks, 400)
    built.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    eos = {"content": "<|stop|>", "__type": "AddedToken"}
    return save_tokenizer(folder, built, eos, bos_token="<|begin|>", chat_template=PLAIN)


def test_ids_equal_transformers(folder, tmp_path):
    tokenizer, hf_tokenizer = Tokenizer(folder), TheirTokenizer(folder)
    text = "A list isn't a tuple: 2 + 2\n\n"
    assert tokenizer.encode_prompt(text) == hf_tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
    data = prepare(tmp_path / "cache", tokenizer, jsonl(tmp_path, [{"text": text}] * 2))
    assert data.train.tokens.tolist() == [*hf_tokenizer(text)["input_ids"], tokenizer.eos_id] * 2
    question_ids = hf_tokenizer.apply_chat_template(SAID[:3], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.encode_chat_prompt(SAID[:3]) == question_ids
    assert {*tokenizer.answer_end_ids} == {hf_tokenizer.use("convert_tokens_to_ids", "<|end|>")}


def test_a_template_renders_the_date_of_the_plan(folder, tmp_path):
    """Otherwise a run could not be resumed on another day (trl#5138)."""
    dated = shutil.copytree(folder, tmp_path / "dated")
    template = PLAIN.replace("message.content", "strftime_now('%d %b %Y') + message.content")
    edit_json(dated / "tokenizer_config.json", chat_template=template)
    days = ("2024-02-29", "2025-01-01")
    first, second = (Tokenizer(dated, date=day) for day in days)
    assert "29 Feb 2024What is a list?" in first.renderer.render_prompt(SAID[:1])
    assert "01 Jan 2025What is a list?" in second.renderer.render_prompt(SAID[:1])
    assert first.fingerprint == Tokenizer(dated, date=days[0]).fingerprint != second.fingerprint
    assert len({Tokenizer(folder, date=day).fingerprint for day in days}) == 1


@pytest.mark.parametrize("template", [None, FORGETFUL])
@pytest.mark.parametrize("is_base", [True, False])
def test_a_system_prompt_and_a_template_are_exported(is_base, template, folder, tmp_path):
    """The prompt is code of the template, so that other programs use it too. The embedded
    tokenizer, like that of a base model, has no template."""
    system = "Say \"no\" \\ {{ 1 }} %}\n'🙂'"
    source = EMBEDDED_DIR if is_base else folder
    plain, ours = Tokenizer(source), Tokenizer(source, template=template, system=system)
    assert plain.fingerprint != ours.fingerprint
    with_prompt = [{"role": "system", "content": system}, SAID[0]]
    asks = ours.renderer.render_prompt(SAID[:1])
    assert asks == ours.renderer.render_prompt(with_prompt)
    assert asks.count(system) == 1
    other = [{"role": "system", "content": "Be brief."}, SAID[0]]
    assert system not in ours.renderer.render_prompt(other)
    ids = ours.encode_chat_prompt(SAID[:1])
    assert ours.decode_question(ids) == SAID[0]["content"]
    ours.save(tmp_path, chat=True)
    assert Tokenizer(tmp_path).encode_chat_prompt(SAID[:1]) == ids
    theirs = TheirTokenizer(tmp_path)
    text = theirs.apply_chat_template(SAID[:1], add_generation_prompt=True, tokenize=False)
    assert theirs.use("encode", text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["chatml", "llama-3"])
def test_answers_in_shipped_templates_end_generation(name, tmp_path):
    Tokenizer(EMBEDDED_DIR, template=read_template(name)).save(tmp_path, chat=True)
    theirs = TheirTokenizer(tmp_path)
    text = theirs.apply_chat_template([*SAID[:1], ANSWER], tokenize=False)
    assert text.rstrip().endswith(ANSWER["content"] + theirs.read("eos_token"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_file_that_is_a_link_to_another_folder_is_refused(name, folder, tmp_path):
    linked = shutil.copytree(folder, tmp_path / "linked")
    (tmp_path / "secret").write_text("{}")
    (linked / name).unlink(missing_ok=True)
    (linked / name).symlink_to(tmp_path / "secret")
    with refused(str(linked / name), "link"):
        assert Tokenizer(linked).facts
    with refused(str(linked / name), "link"):
        load_model_json(linked / name)


def test_marks_of_the_next_turn_end_answers_and_tool_calls(tmp_path):
    """As under GLM-4.5's template. A model that learns to end a call must also stop there."""
    marks = ["<|stop|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    template += "{{ message.tool_calls | tojson if message.tool_calls }}{% endfor %}"
    template += "{{ '<|assistant|>' if add_generation_prompt }}"
    built = train_bpe(read_prose()[:50], marks, 400)
    tokenizer = Tokenizer(save_tokenizer(tmp_path, built, "<|stop|>", chat_template=template))
    assert tokenizer.answer_end_ids == tokenizer.encode_texts(["<|user|><|tool|>"])[0].tolist()


def test_only_files_of_the_tokenizer_are_saved(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    (tmp_path / "secret").write_text("hf_secret")
    for name in ("token", "vocab_notes.md"):
        (source / name).symlink_to(tmp_path / "secret")
    Tokenizer(source).save(tmp_path / "hf")
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


SAMPLES = [
    "", " ", "Hello world", "  two  spaces\n\nand\tlines\r\n", "don't WE'LL 123456 1e-5 a_b_c",
    "def f(x: int) -> int:\n    return x ** 2  # it's 100% fine, isn't it?",
    "naïve café — “quotes” … ½ №5", "日本語 العربية עברית ไทย हिन्दी", "\x00\x01\x7f\x85",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2028\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("name", ["shipped", "chat"])
def test_a_saved_folder_gives_the_same_ids_in_transformers(name, tokenizer, folder, tmp_path):
    ours = tokenizer if name == "shipped" else Tokenizer(folder)
    ours.save(tmp_path / "new" / "folder", chat=name == "chat")
    hf_tokenizer = TheirTokenizer(tmp_path / "new" / "folder")
    texts = [*SAMPLES, f"a{END_OF_TEXT}b"]
    rows = ours.encode_texts(texts, add_special_tokens=True)
    for text, ids in zip(texts, rows, strict=True):
        assert ids.tolist() == hf_tokenizer(text)["input_ids"]
    assert (hf_tokenizer.read("eos_token_id"), len(hf_tokenizer)) == (ours.eos_id, ours.num_tokens)
    assert Tokenizer(tmp_path / "new" / "folder").vocabulary == ours.vocabulary
    assert hf_tokenizer.read("chat_template") == (PLAIN if name == "chat" else None)


CACHED = """
import sys
from pathlib import Path
from distributed_training.data.cache import tokenize
from distributed_training.data.corpus import find_corpus
from distributed_training.data.samples import cut_samples
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.request import build_config, read_template

tokenizer = Tokenizer(Path(sys.argv[1]))
config = build_config({"dataset": sys.argv[2], "max_length": 200})
folder = tokenize(find_corpus(config), tokenizer, config, Path(sys.argv[3]))
form = cut_samples(folder, tokenizer, config).form
print("transformers" in sys.modules, tokenizer.eos_id, tokenizer.is_chat_form(form))
"""


@pytest.mark.processes
def test_ranks_with_cached_tokens_do_not_import_transformers(folder, tmp_path):
    corpus = jsonl(tmp_path, [{"messages": SAID}] * 4)
    prepare(tmp_path / "cache", Tokenizer(folder), corpus, max_length=200)
    command = [sys.executable, "-c", CACHED, folder, tmp_path / "a.jsonl", tmp_path / "cache"]
    assert subprocess.check_output(command, text=True).split() == ["False", "1", "True"]


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    shutil.copytree(EMBEDDED_DIR, tmp_path / "big")
    edit_json(tmp_path / "big" / "vocab.json", extra=2048)
    corpus = corpus_of("embedded-prose")
    config = build_config({"model": "gpt2-tiny"})
    with refused("2,049", "gpt2-tiny", "2,048"):
        tokenize(corpus, Tokenizer(tmp_path / "big"), config, tmp_path, embedding_rows=2048)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eos_token": None}, "end-of-text"),
        (
            {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"},
            "custom code",
        ),
    ],
)
def test_invalid_tokenizer_settings_are_refused(settings, words, folder, tmp_path):
    with refused(f"tokenizer {tmp_path} "):  # an empty folder
        assert Tokenizer(tmp_path).facts
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", **settings)
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(f"tokenizer {tmp_path} "):
        assert Tokenizer(tmp_path).facts
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with refused(f"tokenizer {tmp_path} ", words):
        assert Tokenizer(tmp_path).facts


def count_texts(tmp_path, texts, tokenizer, *, can_pack=True, **config):
    """Return the counts of a dataset of text records."""
    corpus = jsonl(tmp_path / "rows", [{"text": text} for text in texts])
    built = build_config({"dataset": "made", **config})
    folder = tokenize(corpus, tokenizer, built, tmp_path / "cache")
    return summarize(folder, built, can_pack=can_pack)


def test_texts_without_a_token_are_counted(tmp_path):
    """Text that consists of letters missing from the vocabulary has no IDs. Records with such text
    are skipped and counted."""
    built = Builder(models.BPE(vocab={"|": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer = Tokenizer(save_tokenizer(tmp_path, built))
    counts = count_texts(tmp_path, ["ab", "zz", "a", "|", *["b"] * 40], tokenizer, pack=False)
    assert (counts["records"], counts["used"], counts["samples"]) == (44, 42, 42)
    assert counts["left_out"] == {"fewer than two tokens": 2}


@pytest.mark.parametrize(("can_pack", "expected"), [(True, (120, 0)), (False, (40, 40))])
def test_text_records_are_truncated_only_if_they_cannot_be_packed(
    can_pack, expected, tokenizer, tmp_path
):
    """A record that is three blocks long gives three samples if records can be packed. Otherwise,
    only its first block is used."""
    text = "the value of a list is a name " * 3
    length = -(-len(tokenizer.encode_texts([text])[0]) // 3)
    counts = count_texts(tmp_path, [text] * 40, tokenizer, can_pack=can_pack, max_length=length)
    assert (counts["samples"], counts["cut"]) == expected


def test_unknown_characters_are_not_counted_as_special_tokens(tmp_path):
    built = Builder(models.WordLevel({"|": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer = Tokenizer(save_tokenizer(tmp_path, built, unk_token="?"))
    counts = count_texts(tmp_path, ["a", "zz", "a|a", "a"], tokenizer, pack=False)
    assert counts["notes"] == {UNKNOWN: 1, SPECIAL: 1}


SPLIT = r"\p{N}{1,3}|\p{L}+|[^\p{N}\p{L}]+"  # unlike that of GPT-2 and Qwen2


@pytest.mark.parametrize(
    ("cls", "model_type", "kind"),
    [
        ("GPT2Tokenizer", "mistral", "TokenizersBackend"), ("GPT2Tokenizer", "llama", None),
        ("PreTrainedTokenizerFast", "llama", "TokenizersBackend"), (None, "qwen3", None),
        ("PreTrainedTokenizerFast", "qwen2", None),
    ],
)  # fmt: skip
def test_a_run_and_its_export_use_one_tokenizer(cls, model_type, kind, folder, tmp_path):
    """transformers selects the class by the config.json of the model. Some classes replace the
    pre-tokenizer in tokenizer.json (open-instruct#1896, transformers#45812)."""
    source = shutil.copytree(folder, tmp_path / "source")
    built = Builder.from_file(str(source / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    built.save(str(source / "tokenizer.json"))
    names = {"eos_token": "<|stop|>", **({"tokenizer_class": cls} if cls else {})}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer(source, {"model_type": model_type})
    if kind is None:
        with refused(str(source), model_type, "tokenizer.json"):
            tokenizer.check_splits()
        # In a model's own folder, transformers ignores the class that the folder names.
        (source / "config.json").write_text(json.dumps({"model_type": model_type}))
        if cls != "GPT2Tokenizer":
            tokenizer.check_splits()
        return
    tokenizer.check_splits()
    assert tokenizer.facts.kind == kind
    tokenizer.save(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": model_type}))
    texts = [*SAMPLES, *read_prose()[:50]]
    exported = TheirTokenizer(tmp_path / "hf")
    rows = tokenizer.encode_texts(texts, add_special_tokens=True)
    assert [ids.tolist() for ids in rows] == exported(texts)["input_ids"]


def test_each_record_is_read_by_itself(folder, tmp_path):
    """The form of a record and its columns do not depend on the first record (datasets#5772)."""
    pair = {"prompt": "2+2=", "completion": "4"}
    empty = {**pair, "text": "2+2=4"}
    rows = [
        {**empty, "completion": ""}, empty, pair, {**pair, "system": "s"}, CHAT,
        {"text": "a", "prompt": None, "completion": None}, {"text": "b", "messages": []},
        {**pair, "messages": []}, {**CHAT, "prompt": "2 + 2?", "response": "4"},
        {"instruction": "2+2=", "output": "4"}, {**pair, "completion": None, "response": "4"},
    ]  # fmt: skip
    rows += [{"messages": [USER, {**ANSWER, "role": "critic"}]}]
    corpus = jsonl(tmp_path, rows)
    tokenizer, counts = Tokenizer(folder), Counts()
    pieces = list(read_pieces(corpus["train"][0], tokenizer, by_line=False, counts=counts))
    trained = [
        "".join(piece.text[first:last] for first, last in piece.spans)
        if piece.spans
        else piece.text
        for piece in pieces
    ]
    end = "<|end|>\n"
    both = f"4{end}6{end}"
    assert trained == [*[f"4{end}"] * 3, both, "a", "b", f"4{end}", both, *[f"4{end}"] * 2]
    assert counts.left_out == {NO_ANSWER: 2}
    assert counts.forms == {"prompt": 5, "messages": 5, "text": 2}
    assert counts.notes[COPIED] == 2
    with refused("'critic'", NO_ANSWER):
        config = build_config({"dataset": "made"})
        tokenize(jsonl(tmp_path, rows[-1:]), tokenizer, config, tmp_path / "cache")


def test_answers_near_characters_without_a_token_are_refused(tmp_path):
    """The library shifts the offsets after a character that has no token, so the answer could not
    be found."""
    built = Builder(models.BPE(vocab={letter: i for i, letter in enumerate("|:abcd")}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer = Tokenizer(save_tokenizer(tmp_path, built))
    ((_, mask),) = tokenizer.encode_pieces([Piece("a:b|", [(2, 4)], templated=True)])
    assert mask.tolist() == [False, False, True, True]
    with refused(str(tmp_path)):
        tokenizer.encode_pieces([Piece("a1b 22a:4b cd5| b", [(8, 15)], templated=True)])


@pytest.mark.parametrize("text", ["cafe\u0301", "Tie\u0302\u0301ng Vie\u0323\u0302t", "한국어"])
@pytest.mark.parametrize("normalizer", [normalizers.NFC, normalizers.NFKC])
def test_masks_of_decomposed_text_equal_transformers(normalizer, text, tmp_path):
    """macOS and Vietnamese keyboards write accents as characters of their own, which the normalizer
    of Qwen's tokenizers joins to the letter before."""
    text = unicodedata.normalize("NFD", text)
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}|{% else %}"
    template += "{% generation %}{{ m.content }}|{% endgeneration %}{% endif %}{% endfor %}"
    built = train_bpe(["a"], ["|"], 300)
    built.normalizer = normalizer()
    save_tokenizer(tmp_path, built, chat_template=template)
    messages = [{**USER, "content": text}, {**ANSWER, "content": f"{text} {text}"}]
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    theirs = TheirTokenizer(tmp_path).apply_chat_template(messages, **options)
    source = jsonl(tmp_path / "rows", [{"messages": messages}])["train"][0]
    pieces = read_pieces(source, ours := Tokenizer(tmp_path), by_line=False, counts=Counts())
    ((ids, mask),) = ours.encode_pieces(list(pieces))
    assert ids.tolist() == theirs["input_ids"]
    assert mask.tolist() == [*map(bool, theirs["assistant_masks"])]
