"""Compare masks with those of transformers under templates that mark the text of answers. If TRL is
installed, its templates for training are among them."""

import bisect
import importlib.util
import itertools
from pathlib import Path

import pytest

from distributed_training.data.chats import prepare
from distributed_training.data.tokenizer import Tokenizer
from tests.data.templates import HARMONY, SPECIAL_TOKENS, TEMPLATES
from tests.data.test_samples import jsonl
from tests.data.test_tokenizer import save_tokenizer, train_bpe
from tests.data.theirs import TheirTokenizer

ANSWERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}"
    "<|im_start|>{{ m.role ~ '\n' ~ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
THOUGHT = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
CALLS = "{% for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments }}{% endfor %}"
MARKED = {
    "header": "{% generation %}<|im_start|>assistant\n{{ m.content }}CALLS<|im_end|>\n"
    "{% endgeneration %}",
    "thought": "<|im_start|>assistant\n{% generation %}THOUGHT{{ m.content }}CALLS<|im_end|>\n"
    "{% endgeneration %}",
    "last-thought": "<|im_start|>assistant\n{% if loop.last %}{% generation %}THOUGHT"
    "{% endgeneration %}{% endif %}{% generation %}{{ m.content }}CALLS{% endgeneration %}"
    "{% generation %}<|im_end|>{% endgeneration %}\n",
    "first-call": "<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "{{ m.tool_calls[0].function.name if m.tool_calls }}<|im_end|>{% endgeneration %}\n",
}
MARKED = {
    name: ANSWERS.replace("ANSWER", text).replace("THOUGHT", THOUGHT).replace("CALLS", CALLS)
    for name, text in MARKED.items()
}
# As in TRL's template for gpt-oss, the last answer ends differently than earlier ones.
MARKED["harmony"] = HARMONY.replace("'assistant' %}", "'assistant' %}{% generation %}", 1).replace(
    "{% else %}", "{% endgeneration %}{% else %}", 1
)
MARKED["chatml"] = TEMPLATES["chatml-marked"].template
if trl := importlib.util.find_spec("trl"):
    files = Path(trl.origin).parent.glob("chat_templates/*_training.jinja")
    MARKED |= {file.stem: file.read_text() for file in sorted(files)}


def call(*names):
    calls = [
        {"type": "function", "id": "123456789", "function": {"name": name, "arguments": {"x": "y"}}}
        for name in names
    ]
    return {"content": "", "tool_calls": calls}


THOUGHTS = {"reasoning_content": "Hm."}
CONVERSATIONS = {
    "plain": [{"content": "one"}, {"content": "one"}, {"content": "<tag> two"}],
    "empty": [{"content": ""}, {"content": "one"}],
    "thoughts": [{"content": "one", **THOUGHTS}, {"content": "two", **THOUGHTS}],
    "call": [call("get_time"), {"content": "one"}],
    "calls": [{**call("get_time", "get_day"), **THOUGHTS}, {"content": "one"}],
    "call-with-thoughts": [{**call("get_time"), **THOUGHTS}, {"content": "one", **THOUGHTS}],
}


@pytest.fixture(scope="module", params=MARKED)
def folder(request, tmp_path_factory):
    built = train_bpe(["a"], SPECIAL_TOKENS, 300)
    names = {"bos_token": "<s>", "chat_template": MARKED[request.param]}
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), built, "</s>", **names)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_marked_answers_have_the_mask_of_transformers_unless_their_weight_is_0(
    name, folder, tmp_path
):
    theirs = TheirTokenizer(folder)
    answers = CONVERSATIONS[name]
    messages = []
    for i, answer in enumerate(answers):
        is_result = i > 0 and "tool_calls" in answers[i - 1]
        role = {"role": "tool", "tool_call_id": "123456789"} if is_result else {"role": "user"}
        messages += [{**role, "content": f"Turn {i}"}, {"role": "assistant", **answer}]
    try:
        text = theirs.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        pytest.skip(f"the template refuses this conversation: {error}")
    if "Turn 0" not in text or ("tool_calls" in answers[0] and "get_time" not in text):
        pytest.skip("the template omits calls, or contents that are no lists of parts")
    turns = [text.index(f"Turn {i}") for i in range(len(answers))]
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    encoded = theirs.apply_chat_template(messages, **options)
    offsets = theirs(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    turn_of = [bisect.bisect(turns, first) - 1 for first, _ in offsets]
    for weights in itertools.product((1, 0), repeat=len(answers)):
        for answer, weight in zip(messages[1::2], weights, strict=True):
            answer["weight"] = weight
        source = jsonl(tmp_path, [{"messages": messages}])["train"][0]
        ours, counts = Tokenizer(folder), prepare.Counts()
        pieces = list(prepare.read_pieces(source, ours, by_line=False, counts=counts))
        rows = [(ids.tolist(), mask.tolist()) for ids, mask in ours.encode_pieces(pieces)]
        masks = zip(encoded["assistant_masks"], turn_of, strict=True)
        expected = [bool(trained and weights[turn]) for trained, turn in masks]
        assert rows == ([(encoded["input_ids"], expected)] if any(expected) else [])
