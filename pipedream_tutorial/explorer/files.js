// Read and write orders as CSV, with one line per rank and one operation per cell. The tutorial's
// --csv option writes this format, and torch loads it (schedules/ops.py). Also read measured runs
// from the tutorial's Chrome traces (simulate/trace.py).
"use strict";

const WRITTEN = /^(\d{1,9})([FBIW])(\d{1,9})$/;
const WRITTEN_PAIR = /^\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B$/;

// Line endings match Python's csv module.
function toCsv({ orders, ops }) {
  if (ops.some((op) => op.kind === "R")) throw new RuleError("a CSV file cannot contain recomputation");
  return orders.map((order) => order.map(itemText).join() + "\r\n").join("");
}

function fromCsv(text) {
  const lines = text.replace(/^\ufeff/, "").split(/\r\n|\r|\n/);
  const orders = lines.map((line, number) => {
    const cells = line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1"));
    return cells.filter(Boolean).map((cell) => parseItem(cell, `line ${number + 1}`));
  });
  while (orders.length && !orders.at(-1).length) orders.pop();
  if (!orders.length) throw new RuleError("the file has no operations; write cells such as 0F0 and 0B0");
  const schedule = new Schedule(orders);
  checkOnceAndWhole(schedule);
  simulate(repeat(schedule, 2), buildCosts(schedule, { F: 1, I: 1, W: 1, c: 0 }));
  return schedule;
}

function parseItem(cell, where) {
  const pair = WRITTEN_PAIR.exec(cell);
  if (pair) return [...parseItem(pair[1], where), ...parseItem(pair[2], where)];
  const op = WRITTEN.exec(cell);
  if (op) return [buildOp(op[2], Number(op[1]), Number(op[3]))];
  throw new RuleError(`${where}: "${cell.slice(0, 40)}" is not an operation; write 2F0 or 2B0`);
}

function checkOnceAndWhole({ orders, numStages, ops }) {
  const rankOf = new Map(); // by stage
  const there = new Set();
  orders.forEach((order, rank) => order.flat().forEach(({ text, stage }) => {
    const other = rankOf.get(stage) ?? rank;
    if (other !== rank) throw new RuleError(`stage ${stage} is on ranks ${other} and ${rank}`);
    if (there.has(text)) throw new RuleError(`${text} appears twice in the orders`);
    rankOf.set(stage, rank);
    there.add(text);
  }));
  for (let stage = 0; stage < numStages; stage++) {
    for (let i = 0; i <= Math.max(...ops.map((op) => op.microbatch)); i++) {
      const [F, B, I, W] = [..."FBIW"].map((kind) => there.has(keyOf(kind, stage, i)));
      if (F && I === W && I !== B) continue;
      throw new RuleError(`stage ${stage} needs F, and B or both I and W, of microbatch ${i}`);
    }
  }
}

const FIRST_PID = { measured: 2000, predicted: 1000 }; // for rank 0, with at most 1000 microbatches

// Return {group, schedule, lines, cells, last, durations}, with cells as in simulate() and mean
// durations in ms.
function readTrace(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new RuleError("the file is not JSON; use a file that --trace wrote");
  }
  const slices = (document.traceEvents ?? []).filter((e) => e.ph === "X" && e.cat === "compute");
  slices.sort((a, b) => a.ts - b.ts || a.dur - b.dur);
  for (const [group, first] of Object.entries(FIRST_PID)) {
    const own = slices.filter(({ pid }) => pid >= first && pid < first + 1000);
    if (!own.length) continue;
    const ranks = range(1 + Math.max(...own.map(({ pid }) => pid - first)));
    const lines = ranks.map((rank) => own.filter(({ pid }) => pid === first + rank).map(
      ({ ts, dur, args }, index) => {
        const ops = (args.parts ?? [args]).map(({ kind, stage, microbatch }) => buildOp(kind, stage, microbatch));
        return { item: ops, rank, index, start: (ts - own[0].ts) / 1000, end: (ts + dur - own[0].ts) / 1000 };
      },
    ));
    const cells = new Map(lines.flat().flatMap((cell) => cell.item.map((op) => [op.text, cell])));
    const schedule = new Schedule(lines.map((line) => line.map(({ item }) => item)));
    const run = { group, schedule, lines, cells, last: lastEnd(lines) };
    return { ...run, durations: meanDurations(run) };
  }
  throw new RuleError("the file contains no pipeline run; use a file that --trace wrote");
}

// Return the mean durations for all layers of a rank and the communication time, in ms, and each
// rank's factor. A whole backward pass counts as two equal halves, I and W.
function meanDurations(run) {
  const mean = (numbers) => sum(numbers) / numbers.length;
  const rounded = (value) => Math.round(value * 100) / 100;
  const positive = (value) => Math.max(0.01, rounded(value));
  const lasts = (cells) => cells.map(({ start, end }) => end - start);
  const share = (kind) => {
    const own = run.lines.flat().filter(({ item }) => item.length === 1 && item[0].kind === kind);
    return own.length ? mean(lasts(own)) * run.schedule.stagesPerRank : null;
  };
  const half = (share("B") ?? 0) / 2;
  const busy = run.lines.map((line) => sum(lasts(line)));
  return {
    F: positive(share("F") ?? 1),
    I: positive(share("I") ?? half),
    W: positive(share("W") ?? half),
    c: rounded(sendingTime(run)),
    scale: busy.map((time) => positive(time / mean(busy))),
  };
}

// Return the median time, in ms, from the end of an operation to the start of the operation on
// another rank that uses its result. Only idle receivers count (runtime/record.py).
function sendingTime(run) {
  const waited = buildLinks(run).filter(([from, to]) => {
    const before = run.lines[to.rank][to.index - 1];
    return from.rank !== to.rank && (!before || before.end <= from.end);
  });
  const gaps = waited.map(([from, to]) => to.start - from.end).sort((a, b) => a - b);
  const middle = gaps.length / 2;
  const median = (gaps[Math.ceil(middle) - 1] + gaps[Math.floor(middle)]) / 2;
  return gaps.length ? Math.max(0, median) : 0;
}

function attachFiles() {
  byId("save-csv").onclick = () => attempt(save);
  const open = async ([file], load) => {
    if (!file) return;
    const text = await file.text();
    attempt(() => (load ?? (file.name.endsWith(".json") ? loadTrace : loadCsv))(text, file.name));
  };
  for (const [id, load] of [["load-csv", loadCsv], ["load-trace", loadTrace]]) {
    byId(id).onchange = async () => {
      await open(byId(id).files, load);
      byId(id).value = "";
    };
  }
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    open(event.dataTransfer.files);
  });
}

function attempt(act) {
  const error = refusal(act);
  if (error) say(`Not possible: ${error}.`, "illegal");
}

// Throws RuleError for schedules that a CSV file cannot describe.
function save() {
  const { schedule, n } = resolved(store.chosen);
  if (!main.run) throw new RuleError("there is no order to save");
  if (!main.run.policy.flushes) {
    throw new RuleError("the schedule does not flush, and a CSV file cannot contain weight updates");
  }
  if (n > 1) throw new RuleError("a CSV file contains only one batch; set batches to 1");
  const name = `${schedule === "csv" ? "order" : schedule}.csv`;
  const content = new Blob([toCsv(main.run.timeline.schedule)], { type: "text/csv" });
  const link = el("a", { download: name, href: URL.createObjectURL(content) });
  link.click();
  URL.revokeObjectURL(link.href);
  say(`Saved. To simulate the file, run: python pipedream_simple.py --set schedule=${name}`, "same");
}

function loadCsv(text, name) {
  const schedule = fromCsv(text);
  measured = null;
  store.change(fixedBy(schedule));
  say(`${name}: ${schedule.numRanks} ranks, ${schedule.numMicrobatches} microbatches.`, "same");
}

// The simulation uses the trace's own orders and mean durations. One unit is a millisecond.
function loadTrace(text, name) {
  const trace = readTrace(text);
  const { F, I, W, c, scale } = trace.durations;
  const patch = fixedBy(trace.schedule);
  for (const [key, time] of Object.entries({ F, I, W, c })) patch[key] = String(time);
  patch.scale = scale.every((factor) => factor === 1) ? [] : scale.map(String);
  measured = trace;
  store.change(patch);
  const what = `${name}: the ${trace.group} run is shown below its simulation, which uses the trace's orders`;
  say(`${what} and mean durations, in ms.`, "same");
}

function fixedBy(schedule) {
  const { numRanks: p, numMicrobatches: m } = schedule;
  if (p > RULES.p.whole[1] || m > RULES.m.whole[1]) {
    throw new RuleError(`the file has ${p} ranks and ${m} microbatches, but at most 16 ranks and 64 microbatches are supported`);
  }
  return { schedule: "csv", csv: toCsv(schedule), p, m, n: 1, cut: false, moves: [], level: 0 };
}
