// Show the answer of the table at once, and the planner's own answer when its worker has it.
// Numbers come from the planner; this file only draws and rounds them.
"use strict";

const COLORS = {
  parameters: "#4269d0", gradients: "#efb118", optimizer: "#e4572e", copies: "#6cc5b0", buffers: "#97bbf5",
  activations: "#3ca951", logits: "#a463f2", "CUDA context": "#8b949e", weights: "#4269d0",
  "activations, gradients and logits": "#3ca951", "workspaces of cuBLAS": "#97bbf5", "allocator, at most": "#c9a66b",
};
// What a strategy does, and how it goes on with micro-batches and checkpointing
const STRATEGIES = {
  dp: "each GPU has a copy of the model", fsdp: "the model is sharded over the GPUs", zero1: "the optimizer state is sharded",
  zero2: "the optimizer state and the gradients are sharded", zero3: "the model is sharded over the GPUs by DeepSpeed",
  tp: "each layer is split over the GPUs", pp: "the layers are divided among the GPUs", cp: "each sample is split over the GPUs",
  "3d": "layers are split, divided and copied", hybrid: "the layers are divided, and the divisions copied",
  offload: "the optimizer state is in the computer's memory", infinity: "weights and optimizer state are on disk",
};
const MODES = {
  selective: "some activations are computed again", full: "activations are computed again",
  offload: "activations wait in the computer's memory", "offload-attention": "part of the activations waits in the computer's memory",
};
// Options of the command, as the page calls them
const FIELDS = {
  "--cluster": "GPU", "--gpu": "GPU", "--model": "Model", "--tokens": "Tokens to train on", "--price": "Price per GPU-hour",
  "--for": "I train with", activation_checkpointing: "Gradient checkpointing", max_length: "Tokens per sample", batch_size: "Samples per GPU", lora_rank: "LoRA rank", base_dtype: "base",
};
const GIB = 2 ** 30;
const MY_MODEL = "my-model";  // folder of a pasted config.json
const form = document.forms[0];
const byId = id => document.getElementById(id);

// Text and elements

const round = (value, digits = 3) => Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 4 });
const gib = bytes => (bytes / GIB).toLocaleString("en-US", { maximumFractionDigits: bytes < 10 * GIB ? 2 : 1 });

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function shape(tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function describeLayout({ name, strategy, num_microbatches, axes }) {
  const parts = [STRATEGIES[strategy] ?? strategy];
  if (strategy === "fsdp" && axes.dp_replicate > 1) parts.push(`with ${axes.dp_replicate} copies`);
  if (num_microbatches > 1) parts.push(`${num_microbatches} micro-batches, one after the other`);
  const [, mode, blocks] = name.match(/\+([a-z-]+)(?::(\d+))?/) ?? [];
  if (mode) parts.push(MODES[mode] + (blocks ? ` in ${blocks} blocks` : ""));
  return `${name}: ${parts.join("; ")}.`;
}

// An error or a note names options of the command, which are fields here.
function useFieldNames(text) {
  text = text.replace("add --batch_size auto", "set it to auto").replaceAll("model=", "");
  text = text.replace(/To get this file, whose path .*run:\s*/,
    `To ask about it, choose ${MY_MODEL} as the model, and paste this file, which you get with: `);
  for (const [name, field] of Object.entries(FIELDS)) {
    text = text.replaceAll(new RegExp(`(--)?${name}\\b( ?= ?)?`, "g"), (match, dashes, equals) => `“${field}”${equals ? " " : ""}`);
  }
  return text;
}

// Break the lines of a command only before its options.
function writeCommand(command) {
  const words = command.split(/ (?=--)/).flatMap(word => [element("span", { textContent: word }), " "]);
  return element("pre", {}, ...words.slice(0, -1));
}

function copyButton(label, read) {
  // Browsers allow copying only on pages from this machine or over https.
  const button = element("button", { type: "button", textContent: label, hidden: !navigator.clipboard });
  button.onclick = async () => {
    await navigator.clipboard.writeText(read());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  };
  return button;
}

// The question: the form, the link, and the options of `plan`

const readForm = () => Object.fromEntries(new FormData(form));
const FIRST = { ...readForm(), model: "Qwen/Qwen3-8B", gpu: "RTX-4090" };
// The list of a field shows only what contains its text.
for (const field of [form.elements.model, form.elements.gpu]) field.addEventListener("focus", () => field.select());

function listTrainerOptions(asked) {
  const options = ["--for", asked.trainer, "--cluster", asked.gpu, "--model", asked.model, "--max_length", asked.max_length];
  options.push("--batch_size", asked.batch_size, ...asked.method.split(" ").filter(Boolean));
  if (asked.checkpointing) options.push("--activation_checkpointing", asked.checkpointing);
  return options;
}

function listOptions(asked) {
  if (asked.trainer) return listTrainerOptions(asked);
  const machines = [asked.gpu];
  if (asked.gpus > 1 || asked.nodes > 1) machines.unshift(asked.gpus);
  if (asked.nodes > 1) machines.unshift(asked.nodes);
  const options = ["--cluster", machines.join("x"), ...(asked.model ? ["--model", asked.model] : [])];
  const batchSize = asked.model || asked.batch_size !== "auto" ? asked.batch_size : "1";  // many models with many sizes take minutes
  options.push("--max_length", asked.max_length, "--batch_size", batchSize);
  if (asked.method) options.push(...asked.method.split(" "));
  for (const name of ["tokens", "price"]) if (asked[name].trim()) options.push(`--${name}`, asked[name].trim());
  return options;
}

function writeLink(asked) {
  const isNeeded = name => ["model", "gpu"].includes(name) || (name === "config" && asked.model === MY_MODEL);
  const isChanged = name => name !== "config" && asked[name] !== FIRST[name];
  const changed = Object.entries(asked).filter(([name]) => isNeeded(name) || isChanged(name));
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}

function readLink() {
  const asked = { ...FIRST, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  for (const [name, value] of Object.entries(asked)) {
    const field = form.elements.namedItem(name);
    if (field) field.value = value;
    if (field && !field.value && name !== "model") field.value = FIRST[name];
  }
  form.querySelector("details").open ||= ["tokens", "price", "nodes"].some(name => asked[name] !== FIRST[name]);
}

const quote = word => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`);

// The answer

function show(verdict, fits, status) {
  byId("verdict").textContent = verdict;
  byId("verdict").className = fits;
  byId("status").textContent = status;
}

// A bar of memory by part, and its key
function drawBar(title, parts, cardBytes, fullBytes) {
  const percent = bytes => `${100 * bytes / fullBytes}%`;
  const svg = shape("svg", { height: 44, role: "img", "aria-label": title });
  svg.append(shape("rect", { class: "free", y: 4, width: percent(cardBytes), height: 36 }));
  const key = element("ul", { className: "key" });
  let start = 0;
  for (const [name, bytes] of parts) {
    const fill = COLORS[name] ?? "#8b949e";
    svg.append(shape("rect", { x: percent(start), y: 4, width: percent(bytes), height: 36, fill }));
    const swatch = element("i");
    swatch.style.background = fill;
    key.append(element("li", {}, swatch, `${name} ${gib(bytes)} GiB`));
    start += bytes;
  }
  svg.append(shape("line", { class: "card", x1: percent(cardBytes), x2: percent(cardBytes), y1: 0, y2: 44 }));
  return [svg, key];
}

function drawMemory(layout, cardBytes) {
  const parts = Object.entries(layout.memory_bytes).filter(([, bytes]) => bytes > 0);
  const known = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  if (layout.needed_bytes > known) parts.push(["CUDA context", layout.needed_bytes - known]);
  const full = Math.max(cardBytes, layout.needed_bytes, layout.likely_bytes[1]);
  const title = `Memory per GPU with ${layout.name}: ${gib(layout.needed_bytes)} of ${gib(cardBytes)} GiB`;
  const [low, high] = layout.likely_bytes;
  const text = `${gib(layout.needed_bytes)} of ${gib(cardBytes)} GiB, typically ${gib(low)} to ${gib(high)} GiB. `;
  return [element("h2", { textContent: "Memory per GPU" }), element("p", { className: "note", textContent: describeLayout(layout) }),
    ...drawBar(title, parts, cardBytes, full),
    element("p", { className: "note", textContent: `${text}The red line is the GPU's memory.` })];
}

function listTicks(max) {
  const step = Number((max / 4).toPrecision(1));
  return Array.from({ length: Math.floor(max / step) + 1 }, (_, index) => index * step);
}

function drawSpeeds(answer) {
  const layouts = answer.layouts.filter(layout => layout.tokens_per_s);
  if (layouts.length < 2) return [];
  const picks = answer.picks.map(pick => pick.name);
  const [width, height, left, bottom] = [byId("answer").clientWidth, 260, 56, 36];
  const maxBytes = 1.05 * Math.max(answer.gpu_memory_bytes, ...layouts.map(layout => layout.needed_bytes));
  const maxSpeed = 1.05 * Math.max(...layouts.map(layout => layout.tokens_per_s));
  const x = bytes => left + (width - left - 8) * bytes / maxBytes;
  const y = speed => (height - bottom) * (1 - speed / maxSpeed);
  const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Speed and memory of each layout" });
  for (const speed of listTicks(maxSpeed)) {
    svg.append(shape("line", { class: "axis", x1: left, x2: width, y1: y(speed), y2: y(speed) }));
    svg.append(shape("text", { x: left - 6, y: y(speed) + 4, "text-anchor": "end" }, round(speed)));
  }
  for (const amount of listTicks(maxBytes / GIB)) {
    svg.append(shape("text", { x: x(amount * GIB), y: height - bottom + 16, "text-anchor": "middle" }, round(amount)));
  }
  svg.append(shape("text", { x: width / 2, y: height - 4, "text-anchor": "middle" }, "GiB per GPU"));
  const card = x(answer.gpu_memory_bytes);
  svg.append(shape("line", { class: "card", x1: card, x2: card, y1: 0, y2: height - bottom }));
  const isPick = layout => picks.includes(layout.name);
  for (const layout of [...layouts.filter(layout => !isPick(layout)), ...answer.picks]) {
    const circle = shape("circle", { cx: x(layout.needed_bytes), cy: y(layout.tokens_per_s), r: isPick(layout) ? 6 : 4 });
    if (isPick(layout)) circle.setAttribute("class", "pick");
    circle.append(shape("title", {}, `${layout.name}: ${gib(layout.needed_bytes)} GiB, ${round(layout.tokens_per_s)} tokens/s`));
    svg.append(circle);
  }
  return [element("h2", { textContent: "Layouts: tokens/s against memory" }), svg,
    element("p", { className: "note", textContent: "Blue: the planner's choice. The red line is the GPU's memory." })];
}

function listLayouts(answer) {
  const layouts = answer.layouts.slice(0, 100);
  if (layouts.length < 2) return [];
  const rows = layouts.map(layout => element("tr", {},
    element("td", { textContent: describeLayout(layout) }),
    element("td", { className: "number", textContent: `${gib(layout.needed_bytes)} GiB` }),
    element("td", { className: "number", textContent: layout.tokens_per_s ? `${round(layout.tokens_per_s)} tokens/s` : "" })));
  const table = element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, ...rows));
  return [element("details", {}, element("summary", { textContent: `The ${rows.length} best layouts as a table` }), table)];
}

function describeTime(answer) {
  const [first] = answer.picks;
  if (!first.fits || first.step_time_s === null) return [];
  const range = first.likely_s ? `80% range ${first.likely_s.map(seconds => round(seconds)).join(" to ")} s; ` : "";
  const tokens = round(first.tokens_per_s * first.step_time_s, 12);
  const lines = [`A step of ${tokens} tokens takes ${round(first.step_time_s)} s (${range}${first.evidence}).`];
  if (answer.gpu_hours !== null) lines.push(`${answer.num_steps.toLocaleString("en-US")} steps take ${round(answer.gpu_hours)} GPU-hours.`);
  if (answer.cost !== null) lines.push(`They cost ${answer.cost}.`);
  return [element("h2", { textContent: "Time" }), element("p", { textContent: lines.join(" ") })];
}

function describeSuggestions(answer) {
  const lines = answer.suggestions.map(choice => {
    const settings = Object.entries(choice.settings).map(([name, value]) => `${name} ${value}`).join(", ");
    const speed = choice.tokens_per_s ? `, ${round(choice.tokens_per_s)} tokens/s` : "";
    return element("li", { textContent: `${settings}: ${gib(choice.needed_bytes)} GiB${speed}` });
  });
  if (lines.length) return [element("h2", { textContent: "What fits, best first" }), element("ul", {}, ...lines)];
  if (answer.picks[0].fits) return [];
  const text = "The planner knows no settings that fit. Choose more GPUs, a larger GPU or a smaller model.";
  return [element("p", { textContent: text })];
}

function describeModels(models) {
  const kinds = { optimizer: "All weights in bf16", lora_rank: "LoRA adapters", base_dtype: "LoRA adapters on a 4-bit base" };
  return models.flatMap((choice, index) => {
    const kind = kinds[Object.keys(choice.settings).at(-1)] ?? form.elements.method.selectedOptions[0].textContent;
    const line = `${choice.model}: ${gib(choice.needed_bytes)} GiB, ${round(choice.tokens_per_s ?? 0)} tokens/s`;
    const isNew = JSON.stringify(choice.settings) !== JSON.stringify(models[index - 1]?.settings);
    return [...(isNew ? [element("h2", { textContent: kind[0].toUpperCase() + kind.slice(1) })] : []), element("p", { textContent: line })];
  });
}

function describeCommand(command, asked) {
  const parts = [element("h2", { textContent: "Command" }), writeCommand(command)];
  if (asked.model === MY_MODEL) {
    parts.push(element("p", { textContent: `${MY_MODEL} is a folder with the model's config.json and its weights.` }));
  }
  return [...parts, copyButton("Copy the command", () => command)];
}

// What another trainer needs

const trainerName = () => form.elements.trainer.selectedOptions[0].textContent;

function describeTrainer(answer) {
  const { batch_size, max_length, grad_accum_steps, gradient_checkpointing, ...others } = answer.settings;
  const samples = `${batch_size} ${batch_size > 1 ? "samples" : "sample"} of ${max_length.toLocaleString("en-US")} tokens`;
  const settings = Object.entries(others).map(([name, value]) => `${name} ${String(value).replaceAll(",", ", ")}`).join("; ");
  return `${samples}, gradient checkpointing ${gradient_checkpointing ? "on" : "off"}; ${settings}.`;
}

function drawTrainer(answer) {
  const [low, high] = answer.needed_bytes;
  const card = answer.gpu_memory_bytes;
  const allowance = high - answer.peak_bytes - answer.context_bytes;
  const parts = [...Object.entries(answer.memory_bytes), ["CUDA context", answer.context_bytes], ["allocator, at most", allowance]];
  const title = `Memory: ${gib(low)} to ${gib(high)} of ${gib(card)} GiB`;
  const text = `All tensors need ${gib(answer.peak_bytes)} GiB at the peak. With CUDA and what PyTorch's allocator reserved in ` +
    `8 of 10 runs of trainplan, ${gib(low)} to ${gib(high)} GiB. The red line is the GPU's memory.`;
  return [element("h2", { textContent: "Memory" }), element("p", { className: "note", textContent: describeTrainer(answer) }),
    ...drawBar(title, parts, card, Math.max(card, high)), element("p", { className: "note", textContent: text })];
}

function describeTrainerTime({ step_time_s: times, python_may_be_slower: isSlow }) {
  if (!times) return "The time of a step is not known.";
  return `A step takes ${round(times[0], 2)} to ${round(times[1], 2)} s${isSlow ? ", because Python may be slower than the GPU" : ""}.`;
}

function describeSuite({ suite, not_translated: missing }) {
  const [first] = suite.picks;
  const lines = [suite.verdict];
  if (first.fits && first.step_time_s) lines.push(`A step takes ${round(first.step_time_s, 2)} s.`);
  lines.push("Its kernels, its data order and its first adapters differ.");
  if (missing.length) lines.push(`Not translated: ${missing.join(", ")}.`);
  const command = first.fits ? [writeCommand(suite.command), copyButton("Copy the command", () => suite.command)] : [];
  return [element("h2", { textContent: "As many tokens per step with trainplan" }), element("p", { textContent: lines.join(" ") }), ...command];
}

function describeEvidence(answer, asked) {
  const versions = Object.entries(answer.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  const how = answer.trainer === "unsloth" ? "By a formula, for" : "One step was traced without a GPU, with";
  const file = `trainplan plan --for ${answer.trainer} FILE.yaml --cluster ${quote(asked.gpu)}`;
  return [element("h2", { textContent: "How this is known" }),
    element("p", { textContent: `${how} ${versions}. Not modeled: ${answer.not_modeled.join(", ")}.` }),
    element("p", { textContent: "For your own settings or versions, ask in a terminal:" }), writeCommand(file)];
}

function showTrainer(answer, asked, milliseconds) {
  const verb = { yes: "fits", tight: "may just fit", no: "does not fit" }[answer.fits];
  const [low, high] = answer.needed_bytes.map(gib);
  show(`${answer.model} ${verb} with ${trainerName()}: ${low} to ${high} of ${gib(answer.gpu_memory_bytes)} GiB (${answer.gpu}).`,
    answer.fits === "no" ? "no" : "yes", `Computed in ${round(milliseconds / 1000, 2)} s in this browser.`);
  byId("answer").replaceChildren(...drawTrainer(answer), element("h2", { textContent: "Time" }),
    element("p", { textContent: describeTrainerTime(answer) }), ...describeSuite(answer), ...describeEvidence(answer, asked));
}

function showUntraced(text, asked) {
  const options = listOptions({ ...asked, batch_size: asked.batch_size === "auto" ? "1" : asked.batch_size });
  const command = `trainplan plan ${options.map(quote).join(" ")}`;
  show(text.replace(/^error: /, ""), "", "");
  const how = `In a terminal, with an environment that has ${trainerName()}, this takes less than a minute:`;
  byId("answer").replaceChildren(element("p", { textContent: how }), writeCommand(command), copyButton("Copy the command", () => command));
}

function showAnswer(text, asked, milliseconds) {
  if (asked.trainer && text.includes("was not traced")) return showUntraced(text, asked);
  if (!text.startsWith("{")) {
    const command = `python real_model_example.py plan ${listOptions(asked).map(quote).join(" ")}`;
    show(useFieldNames(text.replace(/^error: /, "")), "no", "");
    byId("answer").replaceChildren(...(text.includes("measured with torch") ? describeCommand(command, asked) : []));
    return;
  }
  const answer = JSON.parse(text);
  if (answer.trainer) return showTrainer(answer, asked, milliseconds);
  if (answer.models) {
    show(`The largest models that ${asked.gpu} can train`, "yes", "Of the listed models with a context of at least 32,768 tokens, without offload.");
    byId("answer").replaceChildren(...describeModels(answer.models));
    return;
  }
  const [first] = answer.picks;
  show(answer.verdict, first.fits ? "yes" : "no", `Computed in ${round(milliseconds / 1000, 2)} s in this browser.`);
  byId("answer").replaceChildren(
    ...describeSuggestions(answer), ...drawMemory(first, answer.gpu_memory_bytes), ...describeTime(answer),
    ...drawSpeeds(answer), ...listLayouts(answer), ...(first.fits ? describeCommand(answer.command, asked) : []),
    element("ul", {}, ...answer.notes.map(note => element("li", { textContent: useFieldNames(note) }))));
}

// The worker with the planner. It answers one question at a time, and only the newest matters.

let worker = null;
let isReady = false;
let isBusy = false;
let newest = null;  // the question in the form, and its answer
let numAsked = 0;
let waiting = "The planner is loading (about 9 MB, once) ...";

function askWorker() {
  if (!worker || !isReady || isBusy || newest === null) return;
  isBusy = true;
  byId("status").textContent = "The planner is computing ...";
  worker.postMessage({ id: newest.id, options: listOptions(newest.asked), config: newest.asked.config });
}

function fail(reason) {
  worker = null;
  waiting = reason;
  byId("status").textContent = reason;
}

function startWorker() {
  if (location.protocol === "file:") {
    waiting = "For other questions, serve this folder: python -m http.server, then open http://localhost:8000";
    return;
  }
  worker = new Worker("worker.js", { type: "module" });
  worker.onerror = () => fail("The planner could not be loaded. To build it, type make page.");
  worker.onmessage = ({ data }) => {
    if (data.failed) {
      fail(`The planner could not be started: ${data.failed.trim().split("\n").at(-1)}`);
    } else if (data.ready) {
      document.documentElement.dataset.ready = Math.round(data.milliseconds);
      isReady = true;
      askWorker();
    } else {
      isBusy = false;
      if (data.id !== newest?.id) return askWorker();
      showAnswer(data.text, newest.asked, data.milliseconds);
      newest.data = data;
      document.documentElement.dataset.answered = data.id;
    }
  };
}

function ask() {
  const asked = readForm();
  byId("config").hidden = asked.model !== MY_MODEL;
  for (const label of form.querySelectorAll("[data-for]")) label.hidden = (label.dataset.for === "others") !== Boolean(asked.trainer);
  if (asked.trainer && !asked.model) {
    newest = null;
    show(`Choose the model that you train with ${trainerName()}.`, "", "");
    byId("answer").replaceChildren();
    return;
  }
  if (!form.checkValidity() || (asked.model === MY_MODEL && !asked.config.trim())) {
    newest = null;
    show(form.checkValidity() ? "Paste the model's config.json." : "A number is not valid, or the GPU is missing.", "", "");
    byId("answer").replaceChildren();
    return;
  }
  writeLink(asked);
  newest = { id: ++numAsked, asked, data: null };
  const options = listOptions(asked).join(" ");
  const cell = [...document.querySelectorAll("td[data-options]")].find(cell => cell.dataset.options === options);
  show(cell?.textContent ?? (worker ? "…" : "The table has no answer to this question."), "", waiting);
  byId("answer").replaceChildren();
  askWorker();
}

readLink();
form.addEventListener("change", ask);
form.elements.config.addEventListener("input", ask);
form.addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", () => { readLink(); ask(); });
addEventListener("resize", () => { if (newest?.data) showAnswer(newest.data.text, newest.asked, newest.data.milliseconds); });
byId("link").replaceWith(copyButton("Copy a link to this question", () => location.href));
startWorker();
ask();
