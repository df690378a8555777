// Compile the modules that the planner uses, and leave out the others: node pack.mjs FOLDER
// Python's own modules load faster, too, once they are compiled.
import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { start } from "./start.mjs";

const folder = resolve(process.argv[2]);
const runtime = `${folder}/runtime/`;
const { loadPyodide } = await import(pathToFileURL(`${runtime}pyodide.mjs`));
const [planner, source] = ["planner.zip", "ask.py"].map(name => readFileSync(`${folder}/${name}`));
const { python, ask } = await start(loadPyodide, runtime, planner, source.toString());

// These requests load all modules: they are answered, refused, need torch, and read a shipped size.
const llama = {
  model_type: "llama", vocab_size: 32000, max_position_embeddings: 4096, num_hidden_layers: 32,
  num_attention_heads: 32, hidden_size: 4096, intermediate_size: 11008,
};
const questions = [
  ["2x8xT4", "my-model", llama], ["5090 ti", "my-model", llama],
  ["T4", "my-model", { model_type: "gemma" }], ["T4", "google/gemma-3-4b-it", {}],
];
for (const [cluster, model, config] of questions) {
  const options = ["--cluster", cluster, "--model", model, "--tokens", "1M", "--price", "1 USD"];
  ask(options, JSON.stringify(config));
}

for (const trainer of ["trl", "unsloth"]) {
  ask(["--for", trainer, "--cluster", "T4", "--model", "Qwen/Qwen3-8B", "--lora_rank", "16", "--batch_size", "1"]);
}

python.FS.writeFile("/stdlib.zip", readFileSync(`${runtime}python_stdlib.zip`));
python.runPython(`
import pathlib
import py_compile
import zipfile

KEPT = {"distributed_training", "strategies", "configs", "licenses", "planner_page"}
UNCOMPILED = {"strategies", "real_model_example.py"}  # the planner names or reads these files
SUFFIXES = {".py", ".json", ".so", ""}
used = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}


def pack(folder, loaded_from, archive):
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for file in sorted(pathlib.Path(folder).rglob("*")):
            name = file.relative_to(folder)
            is_needed = f"{loaded_from}/{name}" in used or KEPT & {*name.parts}
            if not is_needed or not file.is_file() or file.suffix not in SUFFIXES:
                continue
            if file.suffix == ".py" and name.parts[0] not in UNCOMPILED:
                py_compile.compile(file, file.with_suffix(".pyc"), dfile=str(name), doraise=True)
                file, name = file.with_suffix(".pyc"), name.with_suffix(".pyc")
            packed.write(file, name)


shutil.unpack_archive("/stdlib.zip", "/stdlib")
pack("/stdlib", os.path.dirname(shutil.__file__), "/stdlib.zip")
pack("/planner", "/planner", "/planner.zip")
`);
writeFileSync(`${folder}/planner.zip`, python.FS.readFile("/planner.zip"));
writeFileSync(`${runtime}python_stdlib.zip`, python.FS.readFile("/stdlib.zip"));
