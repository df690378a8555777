"""CONFIG, presets and the command line merged into one validated, immutable Request. No torch.

A field of RunConfig is all there is to a key: its type, default, other names, whether it is part of
the work, and below it its help. Errors, `--help`, `--key value` and the guide's reference follow.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, ValidationError

from distributed_training.settings import files
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import Model, shown
from distributed_training.settings.keys import Key, Options, by_key, key, read_keys

AUTO = "auto"
RENDEZVOUS_S = 120  # until whoever has not come counts as missing
PRESETS_DIR = files.ROOT / "configs" / "presets"
PATHS = {"model", "dataset", "validation_dataset", "tokenizer", "weights"}
PATHS |= {"deepspeed_config", "offload_dir", "output_dir", "resume"}
# Keys stand by the need that one looks for them with.
data = functools.partial(key, work=True, group="Model and text")
learning = functools.partial(key, work=True, group="Batch and learning")
layout = functools.partial(key, work=False, group="Strategy and layout")
memory = functools.partial(key, work=False, group="Less memory")
speed = functools.partial(key, work=False, group="More speed")
watching = functools.partial(key, work=False, group="What is looked at")
keeping = functools.partial(key, work=False, group="What is kept")
trouble = functools.partial(key, work=False, group="When something goes wrong")

Auto = Literal["auto"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "zb-auto"]
PIPELINE_SCHEDULES: tuple[str, ...] = get_args(PipelineSchedule)
Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=1, le=2**31)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31)]
Rate = Annotated[float, Field(ge=0, le=10)]
CountOrAll = Annotated[int, Field(ge=1, le=2**62)] | Literal[-1]
Axis = Annotated[int, Field(ge=1, le=2**20)] | Literal[-1] | None


class RunConfig(Options):
    """A value for each of CONFIG's keys, validated."""

    # fmt: off
    model: Text = data(AUTO, aliases=("model_name", "model_name_or_path"))
    """gpt2-tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-xl-20-heads, a Llama, Mistral or Qwen
    by its name on the Hub, a folder; auto: gpt2-tiny without a GPU, gpt2 below 12 GiB, else
    gpt2-medium"""
    dataset: Text = data(AUTO, aliases=("data", "train_file"))
    """a .txt, .md, .jsonl, .json, .csv or .parquet file, a folder of them, user/name[:config] of
    the Hub, wikitext-2, embedded, embedded-prose; auto: wikitext-2 where available, else
    embedded"""
    validation_dataset: Text | None = data(None, aliases=("validation_file", "eval_dataset"))
    """likewise, to evaluate on; None: dataset's validation split, or its last 5%"""
    columns: Text | None = data(None)
    """names of a dataset's columns, such as prompt=question,completion=answer; None: as they are"""
    tokenizer: Text = data(AUTO)
    """gpt2, embedded, a folder that transformers' AutoTokenizer opens, a model's name on the Hub;
    auto: by model"""
    weights: Text = data(AUTO)
    """pretrained, random, a folder in Hugging Face's format; auto: those of the model you name
    (an error if they are not available), random if you name none"""
    num_samples: CountOrAll | Auto = data(AUTO)
    """the first samples to train on, blocks of running text or records; -1: all; auto: at most
    1000"""
    max_length: Annotated[int, Field(ge=2, le=2**20)] = data(512,
        aliases=("seq_len", "max_seq_length", "block_size"))
    """tokens per sample, up to the model's positions (1024)"""
    pack: bool | Auto = data(AUTO)
    """True: full blocks of max_length tokens, of running text or of whole records that do not see
    each other; False: one padded line or record per sample; auto: True wherever the strategy's
    engine keeps records apart"""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = data(42)
    """initial weights, order of the data, dropout, the generated sample"""
    # Not work: the global batch size is.
    batch_size: Count | Auto = learning(4, aliases=("per_device_train_batch_size",), work=False)
    """sequences per GPU and accumulation step; auto: the fewest that keep a GPU busy"""
    grad_accum_steps: Count = learning(1, aliases=("gradient_accumulation_steps",), work=False)
    """accumulation steps per optimizer step; multiplies batch_size"""
    epochs: Count = learning(2, aliases=("num_epochs", "num_train_epochs"))
    """passes over the training samples"""
    max_steps: Count | Literal[-1] = learning(-1)
    """stop, and end the schedule, after so many optimizer steps, repeating the data if necessary;
    -1: whole epochs"""
    learning_rate: Rate | Auto = learning(AUTO, aliases=("lr",))
    """peak; auto: 2e-4 for adapters, 5e-5 for pretrained weights, 3e-4 for random, 3e-3 for
    gpt2-tiny"""
    lr_schedule: Literal["constant", "linear", "cosine"] = learning("cosine",
        aliases=("lr_scheduler_type",))
    """shape after the warm-up; linear and cosine reach 0 one step after the last"""
    warmup_steps: CountOrZero = learning(10, aliases=("warmup", "num_warmup_steps"))
    """optimizer steps over which the rate rises linearly"""
    optimizer: Literal["adamw", "adamw-bf16", "adamw-8bit"] = learning("adamw")
    """AdamW with moments in fp32, in bf16 (rounded stochastically), or in 8 bits (pip install
    torchao): 16, 12 or 10 bytes per trained parameter with its gradient"""
    weight_decay: Rate = learning(0.01)
    """AdamW's, on matrices; not on biases and norms"""
    max_grad_norm: Annotated[float, Field(ge=1e-9, le=1e9)] | None = learning(1.0,
        aliases=("gradient_clipping",))
    """clip the norm of the whole gradient to this; None: never"""
    dropout: Annotated[float, Field(ge=0, le=0.99)] = learning(0.0)
    """on embeddings, attention and residuals"""
    lora_rank: CountOrZero = learning(0, aliases=("lora_r",))
    """train adapters of this rank beside frozen weights (LoRA); 0: train the weights"""
    lora_alpha: Annotated[float, Field(gt=0, le=2**31)] = learning(16.0)
    """what adapters add is multiplied by lora_alpha / lora_rank"""
    lora_dropout: Annotated[float, Field(ge=0, le=0.99)] = learning(0.0)
    """on what adapters see"""
    lora_targets: Text | None = learning(None, aliases=("lora_target_modules",))
    """matrices of the blocks that get adapters, such as qkv,mlp_in; None: all"""
    strategy: Text = layout(AUTO)
    """where state lives and who computes what; auto: the planner's first choice"""
    deepspeed_config: Text | None = layout(None)
    """a DeepSpeed JSON; None: the strategy's own"""
    dp_replicate: Axis = layout(None)
    """copies of the model; each axis: None: as the strategy says, -1: what is left"""
    dp_shard: Axis = layout(None)
    """processes that a copy's state is divided over"""
    tp: Axis = layout(None)
    """processes that every layer is split over"""
    pp: Axis = layout(None)
    """processes that the layers are dealt out to"""
    sequence_parallel: bool = layout(True)
    """with tp: split what lies between the split layers, too"""
    micro_batch_size: Count | Auto = layout(AUTO)
    """sequences that pass through the model at a time; auto: by layout"""
    num_microbatches: Count | Auto = layout(AUTO)
    """micro-batches of a replica in one optimizer step; auto: by layout"""
    pipeline_schedule: PipelineSchedule | Auto = layout(AUTO)
    """with pp: order of the micro-batches; auto: 1f1b"""
    pipeline_cut: Text | None = layout(None)
    """with pp: blocks of each stage, such as 7,7,7,3; None: equal estimated cost"""
    network_gbit: Annotated[float, Field(gt=0, le=2**20)] | None = layout(None)
    """planned network speed between nodes, in Gbit/s per GPU, as `links` measures it; None: 400"""
    activation_checkpointing: Literal["none", "full", "selective"] = memory("none")
    """what is computed again for the backward pass instead of kept"""
    base_dtype: Literal["auto", "bf16", "nf4"] = memory(AUTO, work=True)
    """with lora_rank: dtype of the frozen weights. nf4: 4 bits in the blocks' matrices (pip install
    bitsandbytes); auto: the compute dtype"""
    loss_chunk_tokens: CountOrZero | Auto = memory(AUTO)
    """tokens whose logits are in memory at the same time; 0: all tokens of a micro-batch; auto: on
    GPUs, as many as cost at most 1% of a step"""
    offload_dir: Text | None = memory(None)
    """where infinity keeps its files; None: output_dir/.offload"""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = speed(AUTO, work=True)
    """dtype of the arithmetic; master weights are fp32"""
    compile: bool | Literal["auto", "whole"] = speed(AUTO)
    """torch.compile, once for all blocks; whole: all of the model, on one process; auto: on GPUs of
    compute capability 7.0 and more"""
    cuda_graphs: bool | Auto = speed(AUTO)
    """launch a training step as one CUDA graph; auto: wherever that is correct"""
    async_tp: bool | Auto = speed(AUTO)
    """with tp, compiled: exchange in parts while a product computes; auto: on H100, H200"""
    fsdp_prefetch: Annotated[int, Field(ge=0, le=100)] = speed(1)
    """under fsdp: blocks whose parameters are gathered ahead of their use"""
    bucket_cap_mb: Annotated[float, Field(ge=0.01, le=2**20)] | None = speed(None)
    """under dp: MiB of gradients that are averaged together; None: PyTorch's, 25"""
    gradient_compression: Literal["none", "bf16", "powersgd", "topk-int8"] = speed("none",
        work=True)
    """under dp: what is sent instead of fp32 gradients"""
    compression_rank: Count = speed(4, work=True)
    """with powersgd: rank of what stands for a matrix's gradient"""
    compression_k: Annotated[float, Field(ge=1e-6, le=1)] = speed(0.01, work=True)
    """with topk-int8: share of the values sent as they are; the rest in 8 bits"""
    eval_every: CountOrZero = watching(0, aliases=("eval_steps",))
    """steps between evaluations; 0: at epochs' ends only"""
    eval_samples: CountOrAll = watching(200)
    """validation samples used, the first so many; -1: all; model auto without a GPU: 50"""
    stop_after: CountOrZero = watching(0, aliases=("early_stopping_patience",))
    """stop early, after this many evaluations in a row without a lower validation loss; 0: never"""
    generate: Text | None = watching("The value of")
    """prompt of the samples before and after training; None: none"""
    log_to: Literal["tensorboard", "wandb", "mlflow", "trackio"] | None = watching(None,
        aliases=("report_to",))
    """another place for the metrics; install it first"""
    profile: Annotated[int, Field(ge=0, le=20)] = watching(0)
    """steps that each rank traces; on a GPU also a snapshot of memory; 0: none"""
    verbose: bool = watching(False)
    """show what libraries print about themselves, too"""
    output_dir: Text = keeping("runs", aliases=("out_dir",))
    """a folder for each run goes here; in CONFIG relative to the script"""
    shared_disk: bool = keeping(True)
    """whether all nodes see output_dir; False: each keeps its own part of a checkpoint"""
    checkpoint_every: CountOrZero | Literal["signal"] | None = keeping(None,
        aliases=("save_steps",))
    """steps between checkpoints; None: at epochs' ends, signal: on Ctrl-C or SIGTERM only, which
    otherwise save, too; 0: never"""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = keeping(1,
        aliases=("save_total_limit",))
    """older ones are deleted"""
    keep_best: bool = keeping(False)
    """write best/ at each evaluation that beats those before"""
    resume: Text | None = keeping(None, aliases=("resume_from_checkpoint",))
    """auto: the newest unfinished run of the same work; or a run's folder"""
    export: bool = keeping(True)
    """write hf/ in Hugging Face's format at the end"""
    export_dtype: Literal["auto", "fp32", "fp16", "bf16"] = keeping(AUTO)
    """dtype of exported weights; auto keeps the dtype of the loaded weights (random: fp32)"""
    push: Text | None = keeping(None, aliases=("hub_model_id",))
    """user/name on the Hugging Face Hub that hf/ is sent to at the end"""
    on_nonfinite: Literal["stop", "skip", "rollback"] = trouble("stop")
    """when a loss or gradient is not finite; rollback: go back to the last checkpoint, once, and
    pass the batch over"""
    hang_timeout_s: CountOrZero | None = trouble(None)
    """seconds without progress that end a run; None: of several processes, 20 times a step's, at
    least 60, and 600 for all else; 0: never"""
    rendezvous_timeout_s: Count = trouble(RENDEZVOUS_S)
    """seconds that processes wait for others to start"""
    # fmt: on

    @property
    def key_values(self) -> dict[str, Any]:
        """The values under CONFIG's keys, in CONFIG's order."""
        return {name: getattr(self, name) for name in KEYS}

    def to_user_words(self) -> dict[str, Any]:
        """Return the values under all names that CONFIG takes, in CONFIG's order."""
        return self.key_values


class Request(RunConfig):
    """CONFIG as it was asked for: what each key got, and from whom. Nothing in it is derived."""

    # Values of the keys that the strategy's own engine adds
    engine_options: dict[str, Any] = Field(default_factory=dict)
    # Who set a key to a value of its own; "CONFIG" only if it differs from the key's default.
    set_by: dict[str, Literal["CONFIG", "preset", "command line", "strategy"]] = Field(
        default_factory=dict
    )
    preset: str | None = None
    force: bool = False  # run although memory is predicted not to suffice
    # Fail if data, weights or tokenizers are missing, instead of using the ones that are shipped
    strict: bool = False

    def is_set(self, *names: str) -> bool:
        """Whether the user set one of these keys; a strategy's default is not the user's."""
        return any(self.set_by.get(name, "strategy") != "strategy" for name in names)

    def to_user_words(self) -> dict[str, Any]:
        """Return the values under CONFIG's keys, then the engine's own options."""
        return self.key_values | self.engine_options


KEYS: dict[str, Key] = read_keys(RunConfig)
AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def with_values(config: AnyConfig, **changes: Any) -> AnyConfig:
    """A copy with other values; raises UserError for one that its key does not accept."""
    return validate(type(config), {**dict(config), **changes}, KEYS)


def validate(model: type[Model], values: Mapping[str, Any], keys: Mapping[str, Key]) -> Model:
    """`values` as `model`, whose keys are `keys`; raise UserError for one that is not accepted."""
    try:
        return model(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
    key = keys[name]
    value = values[name]
    fix = files.did_you_mean(value, key.choices) if isinstance(value, str) else ""
    raise UserError(f"{name}={shown(value)} is not accepted", f"{name} is {key.accepts()}", fix)


def build_config(
    config: Mapping[str, Any],
    *,
    preset: str | None = None,
    overrides: Iterable[str] = (),
    defaults: Callable[[str], Mapping[str, Any]] = lambda _: {},
    options: Callable[[str], type[Options]] = lambda _: Options,
) -> Request:
    """Merge a strategy's `defaults`, for what CONFIG leaves at None or "auto", CONFIG, a preset and
    `key=value` texts, later ones winning; `options` gives the keys that a strategy's engine adds.
    Raises UserError for any key, value or preset that cannot be used."""
    from_preset = {} if preset is None else load_preset(preset)
    texts = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {shown(text)} has no '='", fix="type --set key=value")
        texts.append((name.strip(), value))
    strategy = str({"strategy": AUTO, **config, **from_preset, **dict(texts)}["strategy"])
    own_model = options(strategy)
    own_keys = read_keys(own_model)
    keys = KEYS | own_keys
    given = by_key(config.items(), keys, "CONFIG")
    in_preset = by_key(from_preset.items(), keys, str(preset))
    typed = by_key(texts, keys, "the command line")
    over = in_preset | {name: keys[name].parse(text) for name, text in typed.items()}
    where = f"strategy {strategy}'s defaults"
    decided = {}
    for name, value in by_key(defaults(strategy).items(), keys, where).items():
        if keys[name].work:
            raise UserError(f"{where} have {name}", "it would change the work", "remove it")
        if name not in over and given.get(name) in (None, AUTO):
            decided[name] = value
    values = {**given, **over, **decided}
    own = {name: values.pop(name) for name in own_keys if name in values}
    values["engine_options"] = validate(own_model, own, keys).model_dump()
    for name in PATHS.intersection(values):
        if isinstance(values[name], str):
            values[name] = files.expand_home(name, values[name])
    changed = {name: value for name, value in given.items() if value != keys[name].default}
    set_by = dict.fromkeys(changed, "CONFIG")
    set_by |= dict.fromkeys(in_preset, "preset") | dict.fromkeys(typed, "command line")
    changed |= over
    set_by = {name: who for name, who in set_by.items() if changed[name] != AUTO}
    values["set_by"] = set_by | dict.fromkeys(decided, "strategy")
    values["preset"] = preset
    return validate(Request, values, KEYS)


def load_preset(given: str) -> dict[str, Any]:
    """The values of a preset: a name of ours, or a path."""
    path = Path(files.expand_home("preset", given))
    if not path.exists() and not path.parent.name:  # a bare word: one of ours
        path = PRESETS_DIR / f"{path.stem}.json"
    document = files.load_json(path, "preset")
    if not isinstance(document, dict):
        raise UserError(f"preset {given} is not a JSON object", fix='write {"key": value, ...}')
    return {name: value for name, value in document.items() if name != "_comment"}
