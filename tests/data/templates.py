"""Chat templates that have the structure of published templates but were written for these tests.

TEMPLATES maps each name to a Case, which contains a template and the text around each answer. This
text was derived by hand from the published format, not from the template."""

from typing import NamedTuple


class Case(NamedTuple):
    """A template, and the text that a model generates before and after an answer's content."""

    template: str
    before: str  # text that the model writes before an answer's content
    after: str  # text that the model writes after an answer's content
    last: str = ""  # text that follows only the last answer
    strips: bool = False  # whether whitespace is stripped from contents
    differs_in_history: bool = False  # whether later turns change how an answer is rendered
    next_turn: str = ""  # token that begins the next turn; nothing else ends an answer


def turns(begin, end, *, ask=None, name="message.role", first=""):
    """Return a template that renders each turn as `begin`, the turn's content and `end`. ROLE in
    `begin` stands for the turn's role."""
    role = "{{ " + name + " }}"
    turn = begin.replace("ROLE", role) + "{{ message.content }}" + end
    header = (ask or begin.replace("ROLE", "assistant")).replace("\\n", "\n")
    return (
        first + "{% for message in messages %}" + turn + "{% endfor %}"
        "{% if add_generation_prompt %}" + header + "{% endif %}"
    )


def pairs(user, answer, *, system, ask):
    """Return a template that renders a user message with the template code `user`, and an assistant
    message with `answer`."""
    return (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}" + user
        + "{% elif message.role == 'assistant' %}" + answer
        + "{% else %}" + system + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}" + ask + "{% endif %}"
    )  # fmt: skip


ALTERNATE = (
    "{% for m in messages %}{% if m.role != 'system' and (m.role == 'user') != "
    "((loop.index0 - (messages[0].role == 'system')) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
# As in Llama 2, the system message becomes part of the first question.
FOLDED = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set told = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set told = '' %}{% endif %}"
)
LLAMA_2 = ALTERNATE + FOLDED + (
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ bos_token ~ '[INST] ' ~ (told if loop.index0 == 0 else '') }}"
    "{{ m.content.strip() ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)  # fmt: skip
LLAMA_31 = (
    "{{ bos_token }}{% set d = '26 Jul 2024' %}{% if messages[0].role == 'system' %}"
    "{% set s = messages[0].content | trim %}{% set rest = messages[1:] %}{% else %}"
    "{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' ~ d }}"
    "{{ '\n\n' ~ s ~ '<|eot_id|>' }}"
    "{% for m in rest %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim ~ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_02 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if s is defined and loop.last %}"
    "{{ '[INST] ' ~ s ~ '\n\n' ~ m.content ~ '[/INST]' }}{% else %}"
    "{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% endif %}{% else %}"
    "{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
)
CHATML = turns("<|im_start|>ROLE\n", "<|im_end|>\n")
THINK = "<think>\n\n</think>\n\n"
QWEN_3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set t = m.reasoning_content | default('') %}"
    "{% if loop.index0 > ns.last and (loop.last or t) %}"
    "{{ '<think>\n' ~ t.strip('\n') ~ '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ c ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set p = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set p = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% set r = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' ~ r ~ '\n' ~ (p if loop.first else '') }}{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for c in m.content %}{{ c.text | trim }}"
    "{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK_2 = pairs(
    "{{ 'User: ' ~ message.content ~ '\n\n' }}",
    "{{ 'Assistant: ' ~ message.content ~ eos_token }}",
    system="{{ message.content ~ '\n\n' }}", ask="{{ 'Assistant:' }}",
)  # fmt: skip
DEEPSEEK_R1 = pairs(
    "{{ '<|User|>' ~ message.content }}",
    "{{ '<|Assistant|>' ~ message.content.split('</think>')[-1] ~ '<|end_of_sentence|>' }}",
    system="{{ message.content }}", ask="{{ '<|Assistant|><think>\n' }}",
)  # fmt: skip
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
NEMOTRON = turns("<extra_id_1>ROLE\n", "\n", name="message.role | capitalize",
                ask="<extra_id_1>Assistant\n")  # fmt: skip
MARKED = CHATML.replace(
    "{{ message.content }}<|im_end|>\n",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message.content }}<|im_end|>\n{% endif %}",
)
# As under Gemma 4 and GLM-4.7, only the prompt has a block of reasoning.
GEMMA_4 = turns("<|turn>ROLE\n", "<turn|>\n", ask="<|turn>assistant\n<|channel>thought\n<channel|>")
GLM_47 = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' }}"
    "{{ m.content }}{% endfor %}{{ '<|assistant|><think>' if add_generation_prompt }}"
)
OPEN_TURNS = turns("<|ROLE|>\n", "", first="{{ bos_token }}")
GREETING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

IM = ("", "<|im_end|>\n")
TEMPLATES = {
    "llama-2": Case(LLAMA_2, " ", " </s>", strips=True),
    "llama-3.1": Case(LLAMA_31, "", "<|eot_id|>", strips=True),
    "mistral-0.2": Case(MISTRAL_02, " ", "</s>", differs_in_history=True),
    "qwen-2": Case(CHATML, *IM),
    "qwen-3": Case(QWEN_3, THINK, "<|im_end|>\n", differs_in_history=True),
    "phi-3": Case(PHI_3, "", "<|end|>\n", last="</s>"),
    "gemma-3": Case(GEMMA_3, "", "<end_of_turn>\n", strips=True),
    "deepseek-2": Case(DEEPSEEK_2, " ", "</s>"),
    "deepseek-r1": Case(DEEPSEEK_R1, "", "<|end_of_sentence|>"),
    "gpt-oss": Case(HARMONY, "<|channel|>final<|message|>", "<|return|>", differs_in_history=True),
    "nemotron": Case(NEMOTRON, "", "\n"),
    "chatml-marked": Case(MARKED, "", "<|im_end|>"),
    "thinking-begun": Case(GREETING, "", "<|im_end|>\n"),
    "gemma-4": Case(GEMMA_4, "", "<turn|>\n", differs_in_history=True),
    "glm-4.7": Case(GLM_47, "</think>", "", differs_in_history=True, next_turn="<|user|>"),
    "glm-4": Case(OPEN_TURNS, "", "", next_turn="<|user|>"),
}  # fmt: skip
SPECIAL_TOKENS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>",
    "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<|User|>", "<|Assistant|>",
    "<|end_of_sentence|>", "<|start|>", "<|return|>", "<|message|>", "<|channel|>", "<turn|>",
]  # fmt: skip
