"""Define CONFIG's keys and the Request, which holds the user's values. This module does not import
torch.

Each field of Config defines the type, default and help text of a key. The field also
defines whether the key is part of a run's work. Two runs are comparable only if their work is the
same. Error messages, `--help`, `--key value` options and the guide's reference are derived from the
fields."""

import functools
import os
import re
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from distributed_training.settings.files import parse_as
from distributed_training.settings.keys import KeyModel, config_key, read_keys

AUTO = "auto"
CAPPED_NUM_SAMPLES = 1000  # default of num_samples for comparisons, and for first runs on a CPU
RENDEZVOUS_S = 120  # time to wait for all ranks to join


def _keys_of(group: str, *, work: bool = False) -> Any:
    """Return `config_key` for a group of keys."""
    return functools.partial(config_key, work=work, group=group)


# Keys are grouped by purpose, as in --help and in the guide.
data_key = _keys_of("Model and data", work=True)
training_key = _keys_of("Batch and optimizer", work=True)
layout_key = _keys_of("Strategy and layout")
memory_key = _keys_of("Memory")
speed_key = _keys_of("Speed")
logging_key = _keys_of("Evaluation and logging")
checkpoint_key = _keys_of("Checkpoints and export")
failure_key = _keys_of("Failures and time limits")

Auto = Literal["auto"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]
PIPELINE_SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
Text = Annotated[str, Field(pattern=r"\S")]
# A name or path. It stays a string, because a Path would turn "./a" into "a", which could be a name
# on the Hub.
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=10)]
DropoutRate = Annotated[float, Field(ge=0, le=0.99)]
CountOrAll = Count | Literal[-1]
Axis = CountOrAll | None


def _parse_length(value: Any) -> Any:
    """Return the number of tokens that a context length such as "32k" means."""
    if isinstance(value, str) and re.fullmatch(r"\d+[kK]", value):
        return 1024 * int(value[:-1])
    return value


class Config(KeyModel):
    """Values of CONFIG's keys. Keys that accept "auto" may have this value."""

    # fmt: off
    model: PathText = data_key(AUTO)
    """Model to train: gpt2-tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-xl-20-heads, or
    the name on the Hub (in any spelling if models/table.json lists it), folder or config.json of a
    Llama, Mistral, Qwen or other decoder. auto: gpt2-tiny without
    a GPU, gpt2 on a GPU with less than 12 GiB, otherwise gpt2-medium."""
    dataset: PathText = data_key(AUTO)
    """Training data: a .txt, .md, .jsonl, .json, .csv or .parquet file, a folder of such files,
    user/name[:config[:split]] on the Hub, wikitext-2, embedded, embedded-prose, ellmoor,
    general-chats or short-answers (pairs).
    Several, with weights: a.jsonl:2 b.jsonl:0.5. auto: wikitext-2 if it is available, otherwise
    embedded."""
    validation_dataset: PathText | None = data_key(None)
    """Data to evaluate on, in any form that `dataset` accepts. None: the dataset's
    validation split or, without one, 5% of the dataset: answers at random, other text at its
    end."""
    columns: Text | None = data_key(None)
    """Columns of the dataset to use, such as prompt=question,completion=answer. None: recognize the
    columns by their names."""
    tokenizer: PathText = data_key(AUTO)
    """Tokenizer: gpt2, embedded, a folder that transformers' AutoTokenizer can load, or a model's
    name on the Hub. auto: the model's own tokenizer."""
    chat_template: PathText | None = data_key(None)
    """Chat template: a Jinja file, chatml or llama-3. It is exported with the model. None: the
    tokenizer's own or, without one, a plain template."""
    system: Text | None = data_key(None)
    """System prompt for conversations that have none. It is exported with the chat template. None:
    the template's own."""
    weights: PathText = data_key(AUTO)
    """Initial weights: pretrained, random, or a folder in Hugging Face format. auto: the
    published weights. If they are not available, the run starts from random weights, or is rejected
    if you named the model."""
    num_samples: CountOrAll = data_key(-1)
    """Train on at most this many samples, from the start of the data. A sample is a block of
    running text or a record. -1: all. The default is 1000 if model is auto and there is no GPU, and
    in compare and parity."""
    max_length: Annotated[int, BeforeValidator(_parse_length), Field(ge=2)] = data_key(512)
    """Tokens per sample, up to the model's context length (1024 for GPT-2). 32k means 32768. With
    preference, both answers of a record with their prompts must fit."""
    pack: bool | Auto = data_key(AUTO)
    """True: fill blocks of max_length tokens with running text, or with records that cannot attend
    to each other. False: each sample is one line or record, padded to max_length. auto: True for
    running text, and for records if the model can keep them apart, but False with preference."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = data_key(42)
    """Seed for the initial weights, data order, dropout and generated samples."""
    # Not part of the work, because the global batch size already is.
    batch_size: Count | Auto = training_key(4, work=False)
    """Sequences per GPU per accumulation step. auto: the smallest number that keeps a GPU busy."""
    grad_accum_steps: Count = training_key(1, work=False)
    """Accumulation steps per optimizer step. Each accumulation step uses batch_size sequences per
    GPU."""
    epochs: Count = training_key(2)
    """Passes over the training samples."""
    max_steps: Count | Literal[-1] = training_key(-1)
    """Number of optimizer steps. Overrides `epochs`. The data is repeated if necessary, and the
    learning-rate schedule ends with the last step. -1: train for `epochs`."""
    learning_rate: Rate | Auto = training_key(AUTO)
    """Peak learning rate. auto: 2e-4 for adapters, 5e-5 for pretrained weights, 3e-4 for random
    weights, 3e-3 for gpt2-tiny. With preference: 1e-5 for adapters, 1e-6 for weights."""
    lr_schedule: Literal["constant", "linear", "cosine"] = training_key("cosine")
    """Learning-rate schedule after the warm-up. linear and cosine reach 0 one step after the last
    step."""
    warmup_steps: CountOrZero = training_key(10)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    optimizer: Literal["adamw", "adamw-bf16", "adamw-bf16-weights"] = training_key("adamw")
    """Optimizer. adamw: state in fp32. adamw-bf16: state in bf16 with stochastic rounding.
    adamw-bf16-weights: also weights and gradients in bf16 with stochastic rounding."""
    weight_decay: Rate = training_key(0.01)
    """AdamW's weight decay. It applies to matrices, not to biases and norms."""
    max_grad_norm: Positive | None = training_key(1.0)
    """Clip the global gradient norm to this value. None: do not clip."""
    dropout: DropoutRate = training_key(0.0)
    """Dropout on embeddings, attention and residuals."""
    preference: Literal["none", "dpo", "ipo", "simpo", "orpo"] = training_key("none")
    """Preference tuning: the loss that compares the two answers of each record, chosen and
    rejected. dpo and ipo compare them with the model as the run begins, whose log-probabilities
    are computed before the first step."""
    preference_beta: Positive = training_key(0.1)
    """beta of the preference loss. 2 is usual for simpo."""
    preference_margin: Rate = training_key(0.0)
    """Target margin between the rewards of simpo, called simpo_gamma in TRL."""
    preference_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = training_key(0.0)
    """Probability that the answers of a dpo record are swapped, as in TRL's loss "robust"."""
    preference_sft: Rate = training_key(0.0)
    """Weight of the chosen answers' mean loss per token, which is added to the preference loss, as
    by TRL's loss "sft". orpo always adds it with weight 1."""
    lora_rank: CountOrZero = training_key(0)
    """Train LoRA adapters of this rank and freeze the weights. 0: train all weights."""
    lora_alpha: Positive = training_key(16.0)
    """Adapter scale. The output of each adapter is multiplied by lora_alpha / lora_rank."""
    lora_dropout: DropoutRate = training_key(0.0)
    """Dropout on the input of the LoRA adapters. 0: off."""
    lora_targets: Text | None = training_key(None)
    """Matrices with adapters, by their names in transformers, such as q_proj,v_proj. None: all
    matrices of the blocks."""
    strategy: Text = layout_key(AUTO)
    """Parallelism strategy, defined in `strategies/`. auto: the planner's first choice."""
    deepspeed_config: PathText | None = layout_key(None)
    """Path to a DeepSpeed configuration to use instead of the strategy's own."""
    dp_replicate: Axis = layout_key(None)
    """Number of copies of the model state. For every mesh axis, None uses the strategy's value
    and -1 uses all remaining GPUs."""
    dp_shard: Axis = layout_key(None)
    """Number of GPUs over which each copy of the model state is sharded. Each of these GPUs
    trains on its own share of the batch."""
    cp: Axis = layout_key(None)
    """Number of GPUs over which the tokens of every sample are split (context parallelism). The
    model state is also sharded over these GPUs, unless the strategy does not name dp_shard."""
    expert_parallel: bool = layout_key(False)
    """With fsdp: leave each of a mixture's experts on its GPU, and send tokens to the experts
    instead of gathering the experts for each step (expert parallelism)."""
    tp: Axis = layout_key(None)
    """Number of GPUs over which every layer is sharded (tensor parallelism)."""
    pp: Axis = layout_key(None)
    """Number of GPUs over which the layers are partitioned (pipeline parallelism)."""
    micro_batch_size: Count | Auto = layout_key(AUTO)
    """Sequences per forward pass. auto: chosen for the layout."""
    num_microbatches: Count | Auto = layout_key(AUTO)
    """Micro-batches per replica per optimizer step. auto: chosen for the layout."""
    pipeline_schedule: PipelineSchedule | Auto = layout_key(AUTO)
    """With pp: the order of forward and backward passes. auto: 1f1b."""
    pipeline_cut: Text | None = layout_key(None)
    """With pp: the number of blocks in each stage, such as 7,7,7,3. None: stages of equal estimated
    cost."""
    network_gbit: Positive | None = layout_key(None)
    """Network speed between nodes for predictions, in Gbit/s per GPU, such as 8
    times the bus bandwidth that nccl-tests measure. None: 400."""
    activation_checkpointing: Literal[
        "none", "selective", "full", "offload-attention", "offload"
    ] = memory_key("none")
    """Recompute activations in the backward pass instead of keeping them. selective: everything
    except matrix multiplications and attention. full: whole blocks. offload: whole blocks, whose
    inputs wait in host memory. offload-attention: only MLPs; the tensors that attention saves also
    wait in host memory."""
    checkpointed_blocks: Count | None = memory_key(None)
    """With activation_checkpointing: number of blocks, from the first, that recompute. The others
    keep their activations. None: all."""
    base_dtype: Literal["fp8", "nf4"] | None = memory_key(None, work=True)
    """With lora_rank: dtype of the frozen weights. fp8: 8 bits per weight in the blocks' matrices,
    which are multiplied in fp8 (on GPUs with compute capability 8.9 or higher). nf4: 4 bits per
    weight (needs `pip install bitsandbytes`). None: the compute dtype."""
    loss_chunk_tokens: CountOrZero | Auto = memory_key(AUTO)
    """Compute the loss in chunks of this many tokens, so that only one chunk's logits are in
    memory. 0: all tokens of a micro-batch at once. auto: on GPUs, use chunks that lengthen a step
    by at most 1%."""
    offload_dir: PathText | None = memory_key(None)
    """Folder for the parameter and optimizer files of the strategy infinity. None:
    output_dir/.offload."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = speed_key(AUTO, work=True)
    """Compute dtype. Master weights are fp32. auto: bf16 on GPUs that support it, fp16 on
    older GPUs, fp32 on CPUs."""
    compile: bool | Auto = speed_key(AUTO)
    """Use torch.compile on the blocks, which share one compilation. auto: True on GPUs with compute
    capability 7.0 or higher."""
    cuda_graphs: bool | Auto = speed_key(AUTO)
    """Launch each training step as one CUDA graph. auto: True if the graph gives correct
    results and fits in memory."""
    async_tp: bool | Auto = speed_key(AUTO)
    """With tp and compile: overlap communication with parts of a matrix multiplication. auto: True
    on Hopper GPUs, such as H100 and H200."""
    bucket_cap_mb: Annotated[float, Field(ge=0.01)] | None = speed_key(None)
    """With dp: size in MiB of the buckets in which gradients are averaged. None: PyTorch's default,
    25."""
    gradient_compression: Literal["none", "bf16"] = speed_key("none", work=True)
    """With dp: bf16 sends gradients in bf16, and none sends them in fp32. For PowerSGD or top-k
    compression, set strategy to compressed."""
    eval_every: CountOrZero = logging_key(0)
    """Steps between evaluations. 0: evaluate only at the end of each epoch."""
    eval_samples: CountOrAll = logging_key(200)
    """Evaluate on this many validation samples. -1: all. The default is 50 if model is auto and
    there is no GPU."""
    stop_after: CountOrZero = logging_key(0)
    """Stop early after this many evaluations in a row without a lower validation loss. 0: never."""
    generate: Text | None = logging_key("The value of")
    """Prompt for the samples generated before and after training, unless tp, cp or pp splits the
    model. None: generate no samples."""
    log_to: Literal["tensorboard", "wandb", "trackio"] | None = logging_key(None)
    """Also send metrics to this tracker, which must be installed."""
    profile: Annotated[int, Field(ge=0, le=20)] = logging_key(0)
    """Number of steps that each rank traces. 0: no trace."""
    output_dir: PathText = checkpoint_key("runs")
    """Folder in which each run creates a subfolder. In CONFIG, it is relative to the script."""
    shared_disk: bool = checkpoint_key(True)
    """True: all nodes share output_dir. False: each node keeps its own part of a checkpoint."""
    checkpoint_every: CountOrZero | Literal["signal"] | None = checkpoint_key(None)
    """Steps between checkpoints. None: at the end of each epoch. signal: only on Ctrl-C or SIGTERM.
    0: never. Unless the value is 0, Ctrl-C and SIGTERM also save a checkpoint."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = checkpoint_key(1)
    """Number of checkpoints to keep. Older checkpoints are deleted."""
    keep_best: bool | Auto = checkpoint_key(AUTO)
    """Save the weights to best/ after each evaluation with the lowest validation loss so far.
    auto: True if there are several evaluations, export is True, and saving takes at most 5% of the
    run."""
    resume: PathText | None = checkpoint_key(None)
    """Run to resume: a run's folder, or auto for the unfinished run with the most steps and the
    same model, data and training settings."""
    export: bool = checkpoint_key(True)
    """After training, write the weights to hf/ in Hugging Face format, in the dtype of the loaded
    weights, or in fp32 for random weights."""
    export_text: bool = checkpoint_key(False)
    """Of a multimodal model, write only the text decoder, as a model of its own. By default, hf/
    contains the whole model, with its other parts as they were."""
    on_nonfinite: Literal["stop", "skip"] = failure_key("stop")
    """Reaction to a non-finite loss or gradient. stop: end the run. skip: skip the update."""
    hang_timeout_s: CountOrZero | None = failure_key(None)
    """End the run after this many seconds without progress. 0: never. None: no limit for a single
    process. With several processes, the limit is 600 s. With --num_gpus, the limit of a step is 20
    times the usual step time, but at least 60 s (600 s with compile or profile)."""
    rendezvous_timeout_s: Count = failure_key(RENDEZVOUS_S)
    """Seconds to wait for all ranks to join."""
    # fmt: on

    @property
    def has_pairs(self) -> bool:
        """Return whether each record is a pair of answers, which the loss compares."""
        return self.preference != "none"

    @property
    def has_reference(self) -> bool:
        """Return whether the loss needs the log-probabilities of the answers before training."""
        return self.preference in ("dpo", "ipo")

    @property
    def has_quantized_base(self) -> bool:
        """Return whether the frozen matrices of blocks are stored in fp8 or NF4."""
        return self.base_dtype is not None

    @property
    def has_bf16_weights(self) -> bool:
        """True if trained weights and their gradients are in bf16, without an fp32 copy."""
        return self.optimizer == "adamw-bf16-weights"

    @property
    def offloads_activations(self) -> bool:
        """True if tensors that blocks save for the backward pass wait in host memory."""
        return self.activation_checkpointing.startswith("offload")

    def to_key_values(self) -> dict[str, Any]:
        """Return the value of each CONFIG key, in the order of the fields."""
        return {name: getattr(self, name) for name in KEYS}


def today() -> str:
    """Return today's date in ISO format."""
    return f"{datetime.now():%Y-%m-%d}"


class DraftConfig(Config):
    """CONFIG after the model, the strategy and the layout have been chosen. Only the values that
    depend on the data and the weights may still be "auto": `model`, `dataset`, `tokenizer` and
    `weights` as names, and `learning_rate`, `pack` and `keep_best`."""

    batch_size: Count
    micro_batch_size: Count
    num_microbatches: Count
    pipeline_schedule: PipelineSchedule
    loss_chunk_tokens: CountOrZero
    precision: Literal["bf16", "fp16", "fp32"]
    compile: bool
    cuda_graphs: bool
    async_tp: bool


class RunConfig(DraftConfig):
    """CONFIG of a run. No value is "auto"."""

    learning_rate: Rate
    pack: bool
    keep_best: bool


class Request(Config):
    """CONFIG as the user requested it: the value of each key and the source that set it."""

    # Values of the keys that the strategy's engine declares
    engine_options: dict[str, Any] = Field(default_factory=dict)
    # Keys that the user set; those of CONFIG only if the value differs from the key's default
    set_keys: set[str] = Field(default_factory=set)
    typed: dict[str, str] = Field(default_factory=dict)  # values on the command line, as typed
    preset: str | None = None
    force: bool = False  # start the run even if it is predicted not to fit
    # Fail if data, weights or tokenizers are missing, instead of using the embedded ones
    strict: bool = False
    # Date that chat templates render. A resumed run keeps it, so that its data stay the same.
    date: str = Field(default_factory=today)

    def is_set(self, name: str) -> bool:
        """Return whether the user set the key `name`."""
        return name in self.set_keys

    def to_key_values(self) -> dict[str, Any]:
        """Return the value of each CONFIG key, followed by the engine's own options."""
        return super().to_key_values() | self.engine_options


KEYS = read_keys(Request)
AnyConfig = TypeVar("AnyConfig", bound=Config)


def with_values(config: AnyConfig, **changes: Any) -> AnyConfig:
    """Return a copy of `config` with changed values. Raises UserError for a value that its key does
    not accept."""
    return parse_as(type(config), {**dict(config), **changes})
